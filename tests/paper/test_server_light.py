"""Proposition (server-light): how much memory the server keeps, and that it never takes a gradient."""

from __future__ import annotations

import pytest
import torch

from profcil.engine.channel import stored_bytes
from profcil.engine.run import start
from profcil.methods.pro import Pro
from profcil.methods.promax import ProMax
from profcil.resolve import resolve

SERVER = ("begin", "aggregate", "absorb", "end_position")


@pytest.mark.parametrize("refresh_at", ["final", "freeze", "both"])
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapted"])
@pytest.mark.parametrize("method", ["pro", "promax"])
def test_server_memory_is_the_formula(tiny, method, adapted, refresh_at):
    run = tiny(method, participants=4, adapted_bank=adapted, refresh_at=refresh_at)
    d, held = run.world.net.features, set()
    for position, server in enumerate(run.after_positions()):
        for c in run.world.plan.active(position):
            held |= set(run.world.plan.observed(int(c), position))
        assert set(server.blocks["memory"].labels) == held <= run.world.plan.seen(position)
        per_class = (2 * d + 1) + adapted * (d + 2)
        assert stored_bytes(server.blocks) == 4 * len(held) * per_class


def test_server_memory_does_not_grow_with_the_examples(tiny):
    few, many = (tiny("pro", participants=n) for n in (1, 4))
    biggest = 4 * 10 * (2 * few.world.net.features + 1)
    assert few.state.server_bytes <= many.state.server_bytes <= biggest


def test_transport_summaries_are_not_kept(tiny):
    assert {b.kind for b in tiny("promax").server.blocks.values()} == {"model", "memory"}


@pytest.fixture(params=[("pro", "global"), ("pro", "local"), ("promax", "global")], ids="-".join)
def watched(request, monkeypatch, tmp_path):
    """A whole run, in which gradients raise while the server works; gives the grad mode seen at each server call."""
    method, refresh = request.param
    working, modes = [], {name: set() for name in SERVER}

    def forbid(owner, name):
        original = getattr(owner, name)

        def guarded(*args, **kwargs):
            assert not working, f"the server called {name}"
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    def watch(cls, name):
        original = getattr(cls, name)

        def watching(self, *args):
            modes[name].add(torch.is_grad_enabled())
            working.append(name)
            try:
                return original(self, *args)
            finally:
                working.pop()

        monkeypatch.setattr(cls, name, watching)

    forbid(torch.autograd, "grad")
    forbid(torch.autograd, "backward")
    forbid(torch.Tensor, "backward")
    for name in SERVER:
        watch(ProMax if method == "promax" and name in vars(ProMax) else Pro, name)
    sets = ["warmup.rounds=1", "train.rounds=3", "train.epochs=1", "model.width=4", "clients=4", "participants=3"]
    config = resolve(None, {"method": method}, [*sets, f"refresh={refresh}", "adapted_bank=true", "refresh_at=both"])
    start(config, tmp_path / "run", tmp_path)
    return modes


def test_the_server_never_takes_a_gradient(watched):
    assert all(watched[name] for name in SERVER), "every server half was reached, and none raised"


def test_gradients_are_switched_off_while_the_server_works(watched):
    assert {name: modes for name, modes in watched.items() if True in modes} == {}
