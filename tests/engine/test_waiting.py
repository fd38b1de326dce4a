"""To look at a number on a GPU, or to send a list there, is to wait for all that is under way: turns do it rarely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from profcil.deploy import rehearsal

LOOKS = ("to", "item", "tolist", "__int__", "__bool__", "__float__", "cpu", "numpy", "nonzero", "unique")
MAKES = ("tensor", "as_tensor", "from_numpy", "unique", "nonzero")


@contextmanager
def waits() -> Iterator[list[str]]:
    """What would wait for a GPU, by name, in the order of the calls."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((torch.Tensor, LOOKS), (torch, MAKES)):
            for name in names:
                patch.setattr(owner, name, noted(getattr(owner, name), name, found))
        yield found


def noted(function, name, found):
    def call(*args, **more):
        found.append(name)
        return function(*args, **more)

    return call


def turn(run, round):
    """One client's whole turn at the second position, as if its phases gave back what they were given."""
    return rehearsal.turn(run.method, run.client(run.clients(1, 0)[0], 1, round), dict(run.server.blocks))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pro", "promax", "prolin"])
def test_from_its_second_turn_at_a_position_on_a_client_waits_for_nothing(fresh, method):
    # While PRO's base moves, a projector is drawn on the host and sent anew each round; here it has come to rest.
    more = {"base_rounds": 1, "label_space": "local"} if method in ("pro", "promax") else {}
    run = fresh(method, **more)
    for round in range(run.world.config.train.rounds):
        run.play(0, round)
    run.state.server = run.method.end_position(run.server, run.when(0, 2))
    run.world.forget_features()
    if run.method.opens(run.server, run.when(1, 0)):
        run.play(1, 0)
    assert turn(run, 1).blocks
    with waits() as found:
        assert turn(run, 2).blocks
    assert not found
    run.world.kept = (None, {})
    with waits() as found:
        turn(run, 2)
    assert found


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_nor_does_one_that_is_asked_for_statistics_after_a_turn(fresh, method):
    run = fresh(method, base_rounds=1)
    id, when, inbox = run.clients(0, 0)[0], replace(run.when(0, 2), stage="refresh"), dict(run.server.blocks)
    rehearsal.turn(run.method, run.client(id, 0, 2), inbox)
    assert run.method.survey(run.world.client(id, when), inbox).blocks
    with waits() as found:
        assert run.method.survey(run.world.client(id, when), inbox).blocks
    assert not found


def test_what_was_worked_out_at_another_position_is_not_taken_for_this_one(fresh):
    run = fresh("fedavg")
    id = run.clients(0, 0)[0]
    one, two = (run.client(id, p, 0) for p in (0, 1))
    for client in (one, two, run.client(id, 0, 1)):
        owned = run.world.plan.samples(id, client.when.position)
        assert client.current.tolist() == owned.tolist()
        assert client.labels == tuple(torch.unique(run.world.bundle.train.y[client.current]).tolist())
    assert one.labels != two.labels
