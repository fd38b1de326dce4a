"""`fit_head = "closed"` of PRO and PRO-MAX: the base is fitted against the closed head that a position opens with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from profcil.engine import steps
from profcil.errors import ConfigError
from profcil.memory import linear
from profcil.methods.parts.pro_settings import ProParams

LAST = 2  # the last of three rounds
ALL = {"setting": "homogeneous", "participants": 4}  # all clients have data and take part
CLOSED = {"fit_head": "closed", "covariance": "shared", "noise": 1.0, "auxiliary": 0.0, "keep_temperature": 5.0}


def played(fresh, method: str = "pro", **settings):
    """A run after its first position."""
    run = fresh(method, **{**CLOSED, **ALL, **settings})
    for r in range(LAST + 1):
        run.play(0, r)
    run.state.server = run.method.end_position(run.server, run.when(0, LAST))
    run.world.forget_features()
    return run


def inbox_of(run, position: int, round: int):
    """A client and what it is sent for its turn."""
    client = run.client(run.clients(position, round)[0], position, round)
    names = run.method.broadcast(run.server, client.when)
    return client, {n: run.server.blocks[n] for n in names if n in run.server.blocks}


def test_a_position_opens_with_the_head_of_old_and_new_classes(fresh):
    run = played(fresh)
    before = run.server
    run.play(1, 0)
    head = run.server.blocks["starting_head"]
    clients = [run.client(c, 1, 0) for c in run.clients(1, 0)]
    u = torch.cat([c.features(before.blocks["base"].tensors) for c in clients])
    y = torch.cat([c.y for c in clients])
    labels, _, means = linear.class_means(u, y)
    old = before.blocks["memory"]
    assert head.labels == tuple(sorted({*labels, *old.labels})) and not set(labels) & set(old.labels)
    matrix = linear.unpack(before.blocks["covariance"].tensors["matrix"])
    count = int(before.blocks["covariance"].tensors["count"])
    fresh_cov = linear.within_class_covariance(linear.summarise(u, y))
    cov = (count * matrix + len(u) * fresh_cov) / (count + len(u))
    cov = linear.add_to_diagonal(cov, 0.3 * cov.diagonal().mean())
    means = torch.cat([old.tensors["mean"].double(), means])[torch.tensor([*old.labels, *labels]).argsort()]
    weight, bias = linear.discriminants(means, cov)
    torch.testing.assert_close(head.tensors["weight"].double(), weight, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(head.tensors["bias"].double(), bias, rtol=1e-2, atol=1e-2)
    assert torch.equal(old.tensors["mean"], run.server.blocks["memory"].tensors["mean"])  # the memory has not changed


def test_the_base_is_fitted_as_by_prolin(fresh):
    """The same head, loss and batches: only rehearsal of adapter and head comes in addition."""
    pro = fresh("pro", keep_scores=2.0, **CLOSED, **ALL)
    lin = fresh("prolin", keep_scores=2.0, anchor=False, **ALL)
    start = pro.server.blocks["base"].tensors
    for r in range(2):
        bases = [run.play(0, r).blocks["base"].tensors for run in (pro, lin)]
        for name, tensor in bases[0].items():
            torch.testing.assert_close(tensor, bases[1][name], rtol=1e-2, atol=1e-4)
    assert any(float((t - start[name]).abs().max()) > 1e-2 for name, t in bases[0].items())


def test_fitting_trains_the_base_alone_and_lowers_the_loss_of_the_head(fresh):
    run = played(fresh, proximal=0.0)
    run.play(1, 0)
    client, inbox = inbox_of(run, 1, 1)
    phase = run.method.fit(client, inbox, plastic=True)
    assert phase.blocks == ("base",)
    fitted = steps.run(run.world.net, replace(phase, epochs=5)).weights
    for block in ("adapter", "head"):
        assert all(torch.equal(t, inbox[block].tensors[k]) for k, t in fitted[block].items())
    head = inbox["starting_head"]
    rows = [head.labels.index(y) for y in client.labels]
    weight, bias = (head.tensors[k][rows] / 5.0 for k in ("weight", "bias"))
    target = client.rank
    before, after = (
        float(F.cross_entropy(F.linear(client.features(b), weight, bias), target))
        for b in (inbox["base"].tensors, fitted["base"])
    )
    assert after < before


def test_the_head_is_fixed_during_a_position_and_removed_at_its_end(fresh):
    run = played(fresh, "promax", transport="linear", keep_scores=1.0)
    heads = [run.play(1, r).blocks["starting_head"] for r in range(2)]
    assert heads[0] is heads[1]
    run.play(1, LAST)
    end = run.method.end_position(run.server, run.when(1, LAST))
    assert "starting_head" not in end.blocks
    assert end.blocks["known_classes"].labels == end.blocks["memory"].labels


def test_only_classes_that_are_not_remembered_are_reported(fresh):
    run = played(fresh)
    client, _ = inbox_of(run, 1, 0)
    names = run.method.survey_blocks(run.server, client.when)
    inbox = {n: run.server.blocks[n] for n in names}
    assert run.method.survey(client, inbox).blocks["memory_moments"].labels == client.labels
    known = replace(inbox["known_classes"], labels=client.labels[:1])
    reported = run.method.survey(client, {**inbox, "known_classes": known})
    assert reported.blocks["memory_moments"].labels == client.labels[1:]
    known = replace(known, labels=client.labels)
    assert run.method.survey(client, {**inbox, "known_classes": known}).blocks == {}


def test_a_client_without_a_class_in_the_head_rehearses_only(fresh):
    run = played(fresh)
    run.play(1, 0)
    client, inbox = inbox_of(run, 1, 1)
    old = run.server.blocks["memory"].labels
    head = inbox["starting_head"]
    rows = [head.labels.index(y) for y in old]
    inbox["starting_head"] = replace(head, tensors={k: t[rows] for k, t in head.tensors.items()}, labels=old)
    turn = run.method.turn(client, inbox)
    phase = next(turn)
    assert phase.name == "rehearse"
    with pytest.raises(StopIteration) as done:
        turn.send(steps.run(run.world.net, phase))
    base = done.value.value.blocks["base"].tensors
    assert all(torch.equal(t, inbox["base"].tensors[k]) for k, t in base.items())


def test_a_shared_covariance_is_needed():
    with pytest.raises(ConfigError, match="fit_head"):
        ProParams(fit_head="closed")


@pytest.mark.parametrize("settings", [{"keep_scores": 2.0}, {"auxiliary": 0.05}], ids=str)
def test_reference_and_default_path_agree(fresh, max_difference, settings):
    runs = [played(fresh, accelerate=way, **settings) for way in ("off", "auto")]
    for run in runs:
        for r in range(LAST + 1):
            run.play(1, r)
    assert max_difference(*(run.server for run in runs)) < 2e-2


def test_the_server_stays_finite_on_a_severe_stream(tiny):
    run = tiny("promax", transport="linear", refresh_at="frozen", keep_scores=2.0, **CLOSED)
    assert all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())
