"""A round on a real GPU, where torch raises an error at every synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from profcil.data.bundle import to_device
from profcil.engine import executor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@contextmanager
def waiting(how: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(how)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


ROUNDS = {  # without synchronisation; at the beginning or end of a position these methods must read values
    "target": (0, 1),  # its server makes images at the end
    "hr": (1, 2),  # its server places centroids at the beginning
    "fedcbdr": (1,),  # what is stored is sent at the beginning and chosen at the end
}


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "fedproto", "fedspace", "target", "hr", "fedcbdr", "pro", "promax"]
)
def test_a_round_synchronises_once_after_all_turns(fresh, monkeypatch, method):
    norm = {"model__norm": "batch"} if method == "target" else {}
    run, original, times = fresh(method, device="cuda", **norm), executor.read_back, []
    rounds = ROUNDS.get(method, (0, 1, 2))

    def read_back(*a):
        times.append(1)
        with waiting("default"):
            return original(*a)

    for round in range(3):
        run.play(0, round)
    run.state.server = run.method.end_position(run.server, run.when(0, 2))
    run.world.forget_features()
    for round in range(rounds[0]):
        run.play(1, round)
    monkeypatch.setattr(executor, "read_back", read_back)
    with pytest.raises(RuntimeError), waiting("error"):
        torch.zeros(1, device="cuda").item()
    with waiting("error"):
        for round in rounds:
            run.play(1, round)
    assert len(times) == len(rounds)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [0, 3])
def test_tensors_are_copied_without_synchronisation(where, size):
    given = torch.arange(size, device=where)
    with waiting("error"):
        there = to_device(given, torch.device("cuda"))
    assert there.is_cuda and there.tolist() == list(range(size))
