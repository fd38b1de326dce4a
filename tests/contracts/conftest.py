"""Finished runs of every method, shared by the tests, on the small stream of `profcil.contract.stream`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profcil.contract.stream import (
    BUNDLES,
    DATASET,
    CountedTraffic,
    contract_plan,
    record_traffic,
    short_server_training,
)
from profcil.engine import world as worlds
from profcil.errors import NotApplicable
from profcil.runs.folder import RunFolder

STREAM = {"clients": 3, "participants": 2, "task_size": 2, "train__batch": 8}


@dataclass
class Example:
    """A finished run, with what was recorded during it."""

    run: Any
    traffic: CountedTraffic
    same_random_state: tuple[bool, bool] = (False, False)  # of torch and of numpy, before and after
    saved: Any = None  # the state in the middle of the second position, saved and loaded again
    start: Any = None  # the server before the stream


@pytest.fixture(scope="session")
def make(fresh: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a run that has not started, on one modality, with a normalisation that the method accepts."""

    def begin(name: str, modality: str, planned: bool = True, **settings: Any) -> Any:
        if modality == "graph":
            pytest.importorskip("torch_geometric")
        params = {f"params__{key}": value for key, value in short_server_training(name).items()}
        wanted = STREAM | params | settings
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worlds, "load_bundle", lambda *a: BUNDLES[modality]())
            if planned:
                patch.setattr(worlds, "make_plan", contract_plan)
            try:
                return fresh(name, dataset=DATASET[modality], **wanted)
            except NotApplicable:
                return fresh(name, dataset=DATASET[modality], model__norm="batch", **wanted)

    return begin


@pytest.fixture(scope="session")
def example(make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Example]:
    """The finished run of a method, made once for all tests, which must not change it."""
    done: dict[tuple[str, str], Example] = {}

    def finished(name: str, modality: str) -> Example:
        if (name, modality) not in done:
            done[name, modality] = finish(make(name, modality), tmp_path_factory.mktemp("example"))
        return done[name, modality]

    return finished


def finish(run: Any, folder: Path) -> Example:
    """Run a whole stream and record traffic, random states and a saved state."""
    torch.manual_seed(7)
    np.random.seed(7)
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    out = Example(run, CountedTraffic(), start=run.server)
    record_traffic(run.method, out.traffic)
    with RunFolder(folder / "run") as run_folder:

        def save(what: str, when: Any, facts: dict) -> None:
            if (what, when.position, when.round) == ("round", 1, 1):
                run_folder.save(run.state, "", {})

        run.stream(save)
        out.saved = run_folder.load(torch.device("cpu"))[0]
    same_torch = torch.equal(torch.get_rng_state(), torch_state)
    same_numpy = np.array_equal(np.random.get_state()[1], numpy_state)
    out.same_random_state = (same_torch, same_numpy)
    return out
