"""Saved models of small runs, one of each modality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from saved_examples import Saved

from profcil.contract.case import MethodCase
from profcil.data.input_format import InputFormat
from profcil.runs.models.saved_model import save_model

TEXT_FORMAT = InputFormat("text", (6,), splitter="words", vocabulary=38, words=tuple(f"w{i}" for i in range(2, 38)))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """The saved model of a method on a modality; tests must not change it."""
    made: dict[tuple[str, str], Saved] = {}

    def make(modality: str, method: str = "fedavg") -> Saved:
        if modality == "graph":
            pytest.importorskip("torch_geometric")
        key = (modality, method)
        if key not in made:
            run = MethodCase(method, modality).finished
            shape = tuple(run.world.bundle.train.x.shape[1:])
            form = TEXT_FORMAT if modality == "text" else InputFormat(modality, shape)
            run.world.bundle = replace(run.world.bundle, input_format=form)
            folder = tmp_path_factory.mktemp("saved")
            save_model(folder, run.world, run.method, run.state.server, {"faa": 50.0})
            made[key] = Saved(folder, run)
        return made[key]

    return make


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROFCIL_DEBUG", raising=False)
