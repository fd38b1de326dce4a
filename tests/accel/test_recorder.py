"""What must hold while a step is recorded."""

from __future__ import annotations

import gc
import weakref

import pytest

from profcil.accel.cuda_graphs.recorder import without_gc


class Ring:
    """Something that only a collection takes away."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collecting():
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def littered() -> weakref.ref:
    """A ring that nobody holds, and then enough new objects for a collection of the youngest."""
    ring = weakref.ref(Ring())
    kept = [[] for _ in range(20_000)]
    assert kept
    return ring


def test_garbage_is_left_lying_while_a_step_is_recorded():
    assert littered()() is None
    with without_gc():
        ring = littered()
        assert ring() is not None
    gc.collect()
    assert ring() is None and gc.isenabled()


def test_whoever_had_collections_off_keeps_them_off():
    gc.disable()
    with pytest.raises(ZeroDivisionError), without_gc():
        _ = 1 / 0
    assert not gc.isenabled()
    gc.enable()
    with pytest.raises(ZeroDivisionError), without_gc():
        _ = 1 / 0
    assert gc.isenabled()
