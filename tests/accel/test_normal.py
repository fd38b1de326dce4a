"""Normal numbers in C: those of torch, and the same state of the generator afterwards."""

from __future__ import annotations

import shutil

import pytest
import torch

from profcil.accel.cpu import normal
from profcil.accel.cpu.normal import checked_library, draw_, normal_

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")


def equal_generators(seed: int, before: int = 0) -> tuple[torch.Generator, torch.Generator]:
    """Two generators in the same state, in which some numbers have been drawn."""
    pair = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    for rng in pair:
        torch.rand(before, generator=rng)
    return pair


@needs_compiler
def test_numbers_are_drawn_in_c_here():
    assert checked_library() is not None


@pytest.mark.parametrize("before", [0, 5, 623, 624, 1300])
@pytest.mark.parametrize("shape", [(16,), (3, 5, 7), (624,), (40, 384), (3,), (0,)])
def test_numbers_are_those_of_torch_and_so_are_the_next_draws(shape, before):
    theirs, ours = equal_generators(before, before)
    expected = torch.empty(shape).normal_(generator=theirs)
    out = torch.empty(shape)
    assert normal_(out, ours) is out
    assert torch.allclose(out, expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(torch.rand(700, generator=ours), torch.rand(700, generator=theirs))
    assert torch.equal(torch.randperm(50, generator=ours), torch.randperm(50, generator=theirs))
    assert torch.equal(torch.randn(20, generator=ours), torch.randn(20, generator=theirs))


def test_a_long_draw_is_normal_to_its_tails():
    x = normal_(torch.empty(400, 1000), torch.Generator().manual_seed(3)).double()
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01 and abs((x**4).mean() - 3) < 0.1
    assert 4.2 < x.abs().max() < 6.0


def test_other_tensors_are_filled_by_torch():
    for make in (lambda: torch.zeros(20).double(), lambda: torch.zeros(20, 30).t(), lambda: torch.zeros(40)[::2]):
        theirs, ours = equal_generators(1)
        assert torch.equal(normal_(make(), ours), make().normal_(generator=theirs))
        assert torch.equal(theirs.get_state(), ours.get_state())


@pytest.mark.parametrize("fault", ["numbers", "state", "layout", "no library"])
def test_without_the_library_or_after_a_failed_check_torch_draws(monkeypatch, fault):
    def wrong(library, out, rng):
        draw_(library, out, rng)
        if fault == "state":
            torch.rand(1, generator=rng)
            return out
        return out.add_(1e-3)

    monkeypatch.setattr(normal, "draw_", wrong)
    if fault == "layout":
        monkeypatch.setattr(normal, "draw_", lambda *_: pytest.fail("what is laid out otherwise was read"))
        monkeypatch.setattr(normal, "SIZE", normal.SIZE + 8)
    if fault == "no library":
        monkeypatch.setattr(normal, "c_library", lambda file: None)
    monkeypatch.setattr(normal, "checked_library", checked_library.__wrapped__)
    assert normal.checked_library() is None
    theirs, ours = equal_generators(2)
    assert torch.equal(normal_(torch.empty(100), ours), torch.empty(100).normal_(generator=theirs))
