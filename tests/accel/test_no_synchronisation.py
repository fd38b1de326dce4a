"""Reading a number from a GPU, or sending a list to it, synchronises it. This stand-in on a CPU cannot tell labels on
the CPU from tensors on a GPU, so it tests methods that handle no labels; tests/gpu tests the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from recorders import replaying

from profcil.accel.cuda_graphs.static_steps import BaseStep
from profcil.engine import executor, expected_reply
from profcil.errors import Diverged

READS = ("to", "item", "tolist", "__int__", "__bool__", "__float__", "cpu", "numpy", "nonzero", "unique", "__setitem__")
MAKES = ("tensor", "as_tensor", "from_numpy", "unique", "nonzero")


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """The calls that would synchronise a GPU, by name and in order."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((torch.Tensor, READS), (torch, MAKES)):
            for name in names:
                patch.setattr(owner, name, noted(getattr(owner, name), name, found))
        yield found


def noted(function, name, found):
    def call(*args, **more):
        on_the_device = name == "__setitem__" and isinstance(args[-1], torch.Tensor)  # a number would be sent there
        if not (more.get("non_blocking") or on_the_device):
            found.append(name)
        return function(*args, **more)

    return call


def replayed(run):
    """The run with its steps replayed, as on a GPU."""
    replaying(run)
    return run


def turn(run, round):
    """One client's whole turn at the second position, whose phases return the weights that they were given."""
    client = run.client(run.clients(1, 0)[0], 1, round)
    return expected_reply.run_untrained_turn(run.method, client, dict(run.server.blocks))


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_from_the_second_turn_at_a_position_on_a_client_does_not_synchronise(fresh, method):
    run = fresh(method)
    for round in range(run.world.config.train.rounds):
        run.play(0, round)
    run.state.server = run.method.end_position(run.server, run.when(0, 2))
    run.world.forget_features()
    if run.method.opens(run.server, run.when(1, 0)):
        run.play(1, 0)
    assert turn(run, 1).blocks
    with synchronisations() as found:
        assert turn(run, 2).blocks
    assert not found
    run.world.kept = (None, {})
    with synchronisations() as found:
        turn(run, 2)
    assert found


@pytest.mark.parametrize("method", ["fedproto", "fedspace"])
def test_a_table_of_prototypes_is_made_without_sending_numbers_one_by_one(fresh, method):
    run = fresh(method)
    for round in range(run.world.config.train.rounds):
        run.play(0, round)
    assert turn(run, 1).blocks
    with synchronisations() as found:
        assert turn(run, 2).blocks
    assert "__setitem__" not in found


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_statistics_after_a_turn_do_not_synchronise(fresh, method):
    run = fresh(method, base_rounds=1)
    id, when, inbox = run.clients(0, 0)[0], replace(run.when(0, 2), stage="refresh"), dict(run.server.blocks)
    expected_reply.run_untrained_turn(run.method, run.client(id, 0, 2), inbox)
    assert run.method.survey(run.world.client(id, when), inbox).blocks
    with synchronisations() as found:
        assert run.method.survey(run.world.client(id, when), inbox).blocks
    assert not found


def test_cached_values_of_another_position_are_not_used(fresh):
    run = fresh("fedavg")
    id = run.clients(0, 0)[0]
    one, two = (run.client(id, p, 0) for p in (0, 1))
    for client in (one, two, run.client(id, 0, 1)):
        owned = run.world.plan.samples(id, client.when.position)
        assert client.current.tolist() == owned.tolist()
        assert client.labels == tuple(torch.unique(run.world.bundle.train.y[client.current]).tolist())
    assert one.labels != two.labels


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_round_reads_back_once_after_all_turns(fresh, monkeypatch, method):
    run, seen = replayed(fresh(method)), []
    for round in (0, 1):
        run.play(0, round)
    original = executor.read_back
    monkeypatch.setattr(executor, "read_back", lambda replies, *a: (seen.append(list(found)), original(replies, *a))[1])
    with synchronisations() as found:
        replies = run.turns(0, 1)
    assert seen == [[]] and found == ["tolist"]
    assert all(isinstance(v, float) for r in replies for v in r.notes.values())


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_a_diverged_client_is_found_then_and_the_others_are_unchanged(fresh, monkeypatch, method):
    """Its later phases have been computed with the others by then."""
    end = BaseStep.end

    def diverged(step, phases, lengths):
        step.models.matrix[phases.index(next(p for p in phases if p.client == lost))].fill_(torch.nan)
        return end(step, phases, lengths)

    usual = replayed(fresh(method, train__on_divergence="skip-client"))
    run, strict = (replayed(fresh(method, train__on_divergence=how)) for how in ("skip-client", "fail"))
    first, *_ = others = usual.turns(0, 0)
    lost = first.client
    monkeypatch.setattr(BaseStep, "end", diverged)
    kept = run.turns(0, 0)
    assert [r.client for r in kept] == [r.client for r in others[1:]]
    for one, other in zip(kept, others[1:], strict=True):
        for block, tensors in one.weights().items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, other.blocks[block].tensors[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(Diverged, match=rf"client {lost} diverged at position 1, round 1 \(fit"):
        strict.turns(0, 0)


def test_an_error_of_a_method_about_nan_names_the_diverged_client(fresh, monkeypatch):
    end, run = BaseStep.end, replayed(fresh("fedavg"))
    turn = type(run.method).turn

    def failing(self, client, inbox):
        answer = yield from turn(self, client, inbox)
        if not all(t.isfinite().all() for t in answer.blocks["head"].tensors.values()):
            raise ArithmeticError("no numbers")
        return replace(answer, notes={**answer.notes, "twice": 2 * answer.notes["loss"], "three": 3})

    monkeypatch.setattr(type(run.method), "turn", failing)
    for r in run.turns(0, 0):
        assert r.notes["twice"] == pytest.approx(2 * r.notes["loss"]) and r.notes["three"] == 3.0
    monkeypatch.setattr(BaseStep, "end", lambda step, *a: (step.models.matrix.fill_(torch.nan), end(step, *a))[1])
    with pytest.raises(Diverged, match="diverged at position 1, round 1"):
        run.turns(0, 0)
