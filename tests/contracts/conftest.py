"""Runs of every method that the tests share, on the small stream of `profcil.contract.stream`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profcil.contract.stream import BUNDLES, DATASET, Crossed, plan_of, quick, spy
from profcil.engine import world as worlds
from profcil.errors import NotApplicable
from profcil.runs.folder import RunFolder

STREAM = {"clients": 3, "participants": 2, "task_size": 2, "train__batch": 8}


@dataclass
class Example:
    """A finished run, with what was looked at on the way."""

    run: Any
    crossed: Crossed
    random: tuple[bool, bool]  # whether torch's and numpy's global states were left alone
    saved: Any = None  # the state in the middle of the second position, as a run folder gives it back
    start: Any = None  # the server before the stream


@pytest.fixture(scope="session")
def make(fresh: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a run of any method, not yet started, on a modality it claims and with a normalisation it accepts."""

    def begin(name: str, modality: str, planned: bool = True, **settings: Any) -> Any:
        if modality == "graph":
            pytest.importorskip("torch_geometric")
        wanted = STREAM | {f"params__{k}": v for k, v in quick(name).items()} | settings
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worlds, "load_bundle", lambda *a: BUNDLES[modality]())
            if planned:
                patch.setattr(worlds, "make_plan", plan_of)
            try:
                return fresh(name, dataset=DATASET[modality], **wanted)
            except NotApplicable:
                return fresh(name, dataset=DATASET[modality], model__norm="batch", **wanted)

    return begin


@pytest.fixture(scope="session")
def example(make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Example]:
    """The finished run of a method, played once for all tests; they must not change it."""
    done: dict[tuple[str, str], Example] = {}

    def play(name: str, modality: str) -> Example:
        if (name, modality) not in done:
            done[name, modality] = played(make(name, modality), tmp_path_factory.mktemp("example"))
        return done[name, modality]

    return play


def played(run: Any, folder: Path) -> Example:
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    out = Example(run, Crossed(), (False, False), start=run.server)
    spy(run.method, out.crossed)
    with RunFolder(folder / "run") as kept:

        def save(what: str, when: Any, facts: dict) -> None:
            if (what, when.position, when.round) == ("round", 1, 1):
                kept.save(run.state, "", {})

        run.stream(save)
        out.saved = kept.load(torch.device("cpu"))[0]
    out.random = torch.equal(torch.get_rng_state(), before[0]), np.array_equal(np.random.get_state()[1], before[1])
    return out
