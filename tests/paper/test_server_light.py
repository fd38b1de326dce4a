"""Proposition (server-light): the size of the server's memory, and that the server computes no gradient."""

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
def test_server_memory_has_the_size_of_the_formula(tiny, method, adapted, refresh_at):
    run = tiny(method, participants=4, adapted_bank=adapted, refresh_at=refresh_at)
    d = run.world.net.features
    held = set()
    for position, server in enumerate(run.after_positions()):
        for c in run.world.plan.active(position):
            held |= set(run.world.plan.observed(int(c), position))
        assert set(server.blocks["memory"].labels) == held <= run.world.plan.seen(position)
        per_class = (2 * d + 1) + adapted * (d + 2)
        assert stored_bytes(server.blocks) == 4 * len(held) * per_class


def test_server_memory_does_not_grow_with_the_examples(tiny):
    small, large = (tiny("pro", participants=n) for n in (1, 4))
    bound = 4 * 10 * (2 * small.world.net.features + 1)
    assert small.state.server_bytes <= large.state.server_bytes <= bound


def test_transport_summaries_are_not_stored(tiny):
    assert {b.kind for b in tiny("promax").server.blocks.values()} == {"model", "memory"}


class ServerMonitor:
    """Records the grad mode of every server function, and makes gradients raise while one is running."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch
        self.running = []  # the server functions now on the call stack
        self.modes = {name: set() for name in SERVER}

    def forbid(self, owner, name) -> None:
        """Make a function raise if the server calls it."""
        original = getattr(owner, name)

        def guarded(*args, **kwargs):
            assert not self.running, f"the server called {name}"
            return original(*args, **kwargs)

        self.monkeypatch.setattr(owner, name, guarded)

    def record(self, cls, name) -> None:
        """Record the grad mode at every call of a server function."""
        original = getattr(cls, name)

        def recorded(method, *args):
            self.modes[name].add(torch.is_grad_enabled())
            self.running.append(name)
            try:
                return original(method, *args)
            finally:
                self.running.pop()

        self.monkeypatch.setattr(cls, name, recorded)


@pytest.fixture(params=[("pro", "global"), ("pro", "local"), ("promax", "global")], ids="-".join)
def server_grad_modes(request, monkeypatch, tmp_path):
    """The grad modes seen by each server function in a whole run, in which a gradient on the server raises."""
    method, refresh = request.param
    monitor = ServerMonitor(monkeypatch)
    monitor.forbid(torch.autograd, "grad")
    monitor.forbid(torch.autograd, "backward")
    monitor.forbid(torch.Tensor, "backward")
    for name in SERVER:
        monitor.record(ProMax if method == "promax" and name in vars(ProMax) else Pro, name)
    sets = ["warmup.rounds=1", "train.rounds=3", "train.epochs=1", "model.width=4", "clients=4", "participants=3"]
    config = resolve(None, {"method": method}, [*sets, f"refresh={refresh}", "adapted_bank=true", "refresh_at=both"])
    start(config, tmp_path / "run", tmp_path)
    return monitor.modes


def test_the_server_computes_no_gradient(server_grad_modes):
    assert all(server_grad_modes[name] for name in SERVER), "a server function was not called"


def test_gradients_are_disabled_in_server_functions(server_grad_modes):
    assert {name: modes for name, modes in server_grad_modes.items() if True in modes} == {}
