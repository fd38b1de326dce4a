"""Two clients of twenty lie on CLINC150, in every way of `attacks` that their method can send, in both settings.

A round has ten clients, so that one in ten lies on average, and sometimes two. Robust aggregation loses at most three
points of FAA. Short runs of three positions. `--junitxml FILE` keeps what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS, Attack
from poison_study import METHODS, applicable, dropped_replies, poisoned_run

from profcil.data import clinc150, files
from profcil.errors import DataError

pytestmark = pytest.mark.slow

SHORT = ("task_size=50", "train.rounds=3", "train.epochs=2", "warmup.rounds=2")
OF_METHOD = {"prolin": ("params.dictionary=2000",)}
LIARS = (2, 7)
SETTINGS = ("homogeneous", "severe")
SEEDS = (0,)
CASES = [
    pytest.param(method, setting, seed, attack, id=f"{method}-{setting}-{seed}-{attack.name}")
    for seed in SEEDS
    for setting in SETTINGS
    for method in METHODS
    for attack in applicable(method)
]
HARMFUL = {  # by method, what the plain mean does not survive
    "fedavg": "weights with their sign flipped",
    "pro": "weights with their sign flipped",
    "promax": "shifts of 100, confidence 5",
    "prolin": "far means",
}

Finished = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the datasets, if CLINC150 is there."""
    folder = Path(os.environ.get("PROFCIL_DATA") or "data").absolute()
    try:
        files.locate(clinc150.FACTS, folder, "data_full.json")
    except DataError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Short runs, each only once."""
    folder = tmp_path_factory.mktemp("poisonings")

    @cache
    def run(method: str, setting: str, seed: int, rule: str, attack: Attack | None = None) -> dict[str, Any]:
        more = (*SHORT, *OF_METHOD.get(method, ()))
        where = {"dataset": "clinc150", "setting": setting, "seed": seed, "data": str(data)}
        return poisoned_run(folder, method, rule, attack, LIARS, **where, more=more)

    return run


@pytest.mark.parametrize(("method", "setting", "seed", "attack"), CASES)
def test_robust_aggregation_survives_one_liar_in_ten(
    finished: Finished, record_property: Any, method: str, setting: str, seed: int, attack: Attack
) -> None:
    honest = finished(method, setting, seed, "mean")["metrics"]["faa"]
    found = finished(method, setting, seed, "clipped", attack)
    for name, value in (("honest", honest), ("faa", found["metrics"]["faa"]), ("dropped", dropped_replies(found))):
        record_property(name, value)
    assert found["metrics"]["faa"] >= honest - 3, found.get("error", "")
    # In severe streams an honest shift can be more than three times as long as all others; one such reply is borne.
    assert sum(client not in LIARS for client, _ in dropped_replies(found)) <= (setting == "severe")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_where_nobody_lies_no_reply_is_dropped(
    finished: Finished, record_property: Any, method: str, setting: str, seed: int
) -> None:
    found = finished(method, setting, seed, "clipped")
    record_property("faa", found["metrics"]["faa"])
    assert dropped_replies(found) == []
    assert found["metrics"]["faa"] >= finished(method, setting, seed, "mean")["metrics"]["faa"] - 3


@pytest.mark.parametrize("method", METHODS)
def test_without_it_the_same_lies_do_harm(finished: Finished, method: str) -> None:
    """Else the tests above would show nothing."""
    attack = next(a for a in ATTACKS if a.name == HARMFUL[method])
    honest = finished(method, "homogeneous", 0, "mean")["metrics"]["faa"]
    assert finished(method, "homogeneous", 0, "mean", attack)["metrics"]["faa"] < honest - 10
