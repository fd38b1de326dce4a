"""A tenth of the clients of a deployment is bad, each in one of ten ways: the server continues and blames no other.

With 1,000 clients its memory does not grow from round to round. Time is not tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from load_study import BAD, LoadGrid, deployed_run, kind_of

ROUNDS = 9
SETTLED = 3  # rounds after which memory must not grow: by then bad clients are in quarantine, and buffers are allocated


def blamed(asked: dict[str, Any], played: dict[str, Any]) -> set[int]:
    """The clients of a round whose reply was refused, missing, dropped or left out."""
    found = {*asked["refused"], *asked["silent"], *played.get("dropped", {}), *played.get("opposed", [])}
    return {int(client) for client in found}


def check_rounds(events: list[dict[str, Any]], clients: int, rounds: int) -> None:
    asked = [e for e in events if e["event"] == "asked"]
    played = [e for e in events if e["event"] == "round"]
    assert len(asked) == len(played) == rounds
    for one, other in zip(asked, played, strict=True):
        of_round = {*map(int, one["answered"]), *map(int, one["refused"]), *map(int, one["silent"])}
        assert blamed(one, other) == {c for c in of_round if kind_of(c)}
        assert len(of_round) > clients // 2
    assert {kind_of(c) for c in blamed(asked[0], played[0])} == set(BAD)


def reply_bytes(grid: LoadGrid) -> int:
    """The bytes of the weights in one reply."""
    assert grid.template is not None
    tensors = [t for block in grid.template[1].reply.blocks.values() for t in block.tensors.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def test_a_hundred_clients_with_bad_ones(tmp_path: Path) -> None:
    events, _ = deployed_run(tmp_path, clients=100, rounds=4)
    check_rounds(events, 100, 4)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["done"]


@pytest.mark.slow
def test_memory_does_not_grow_with_a_thousand_clients(tmp_path: Path) -> None:
    """After the fourth round it grows by less than the weights of half of one round's replies."""
    events, grid = deployed_run(tmp_path, clients=1000, rounds=ROUNDS)
    check_rounds(events, 1000, ROUNDS)
    memory = [megabytes for megabytes, _ in grid.begins]
    one_round = 1000 * reply_bytes(grid) / 1e6
    assert max(memory[SETTLED + 1 :]) < max(memory[1 : SETTLED + 1]) + one_round / 2, memory
