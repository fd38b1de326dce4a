"""What must hold while a step is recorded."""

from __future__ import annotations

import gc
import weakref

import pytest

from profcil.accel.cuda_graphs.recorder import without_gc


class Cycle:
    """An object that refers to itself, so that only garbage collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collecting():
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def make_garbage() -> weakref.ref:
    """A cycle without references from outside, and then enough new objects for a collection of the youngest."""
    cycle = weakref.ref(Cycle())
    kept = [[] for _ in range(20_000)]
    assert kept
    return cycle


def test_garbage_is_not_collected_while_a_step_is_recorded():
    assert make_garbage()() is None
    with without_gc():
        cycle = make_garbage()
        assert cycle() is not None
    gc.collect()
    assert cycle() is None and gc.isenabled()


def test_disabled_garbage_collection_stays_disabled():
    gc.disable()
    with pytest.raises(ZeroDivisionError), without_gc():
        _ = 1 / 0
    assert not gc.isenabled()
    gc.enable()
    with pytest.raises(ZeroDivisionError), without_gc():
        _ = 1 / 0
    assert gc.isenabled()
