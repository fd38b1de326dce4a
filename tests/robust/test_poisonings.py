"""One client of ten lies, in every way of `attacks`: robust aggregation loses at most three points of FAA.

Short runs on digits. `python tests/robust/poison_study.py` measures the full ones, for docs/robustness.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from attacks import ATTACKS, Attack
from poison_study import SHORT, applicable, dropped_replies, poisoned_run

LIAR = 2
METHOD = {"model": "pro", "rows": "promax", "transport": "promax", "matrix": "prolin", "sums": "prolin"}
UNSEEN = ("update with its sign flipped", "random update", "no update")  # inside the range, so they are clipped
CASES = [pytest.param(METHOD[a.target], a, id=a.name) for a in ATTACKS]
OF_PROLIN = [pytest.param("prolin", a, id=a.name) for a in applicable("prolin") if a.target == "rows"]
HARMFUL = ("weights with their sign flipped", "update x -100", "counts of 2^31 - 1", "shifts of 100, confidence 5")

Faa = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Faa:
    """Runs of a second, each only once."""
    folder = tmp_path_factory.mktemp("poisonings")

    @cache
    def finished(method: str, rule: str, attack: Attack | None = None) -> dict[str, Any]:
        return poisoned_run(folder, method, rule, attack, (LIAR,), more=SHORT)

    return finished


@pytest.mark.parametrize(("method", "attack"), CASES)
def test_robust_aggregation_survives_one_liar(short: Faa, method: str, attack: Attack) -> None:
    honest = short(method, "mean")["metrics"]["faa"]
    found = short(method, "clipped", attack)
    assert found["metrics"]["faa"] >= honest - 3
    assert {client for client, _ in dropped_replies(found)} <= {LIAR}  # nobody else is blamed
    unseen = attack.name in UNSEEN or attack.target == "sums"  # the search for a dictionary writes no events
    assert bool(dropped_replies(found)) != unseen


@pytest.mark.slow
@pytest.mark.parametrize(("method", "attack"), OF_PROLIN)
def test_prolin_survives_one_liar(short: Faa, method: str, attack: Attack) -> None:
    test_robust_aggregation_survives_one_liar(short, method, attack)


@pytest.mark.parametrize("name", HARMFUL)
def test_without_it_the_same_lies_do_harm(short: Faa, name: str) -> None:
    attack = next(a for a in ATTACKS if a.name == name)
    method = METHOD[attack.target]
    assert short(method, "mean", attack)["metrics"]["faa"] < short(method, "mean")["metrics"]["faa"] - 10


@pytest.mark.parametrize("method", ["pro", "promax", "prolin"])
def test_where_nobody_lies_no_reply_is_dropped(short: Faa, method: str) -> None:
    found = short(method, "clipped")
    assert dropped_replies(found) == []
    assert found["metrics"]["faa"] >= short(method, "mean")["metrics"]["faa"] - 3
