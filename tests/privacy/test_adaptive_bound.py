"""A bound on model updates that follows them: where it goes, what it costs, and what it is good for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_protection import CLIENT, WHEN

from profcil.engine.channel import Block, Channel, Reply, ServerState
from profcil.engine.summed_replies import sum_replies
from profcil.errors import ConfigError
from profcil.methods.parts.addends import MODEL_MEANS
from profcil.metrics.ledger import Ledger
from profcil.privacy import adaptive_bound
from profcil.privacy.meter import Meter
from profcil.privacy.protection import Protection

ADAPTIVE = replace(CLIENT, update_quantile=0.5, update_bound=0.01)
WIDTH = 6


def updates(client: int, length: float) -> tuple[dict[str, Block], dict[str, Block]]:
    """The model that a client was sent, and the one it returns."""
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(client))
    before = {"head": Block("model", {"w": torch.ones(WIDTH)})}
    moved = torch.ones(WIDTH) + length * direction / direction.norm()
    return before, {"head": Block("model", {"w": moved})}


def round_of(protection: Protection, state: ServerState, clients: int, secret: int = 0) -> ServerState:
    """The state after a round in which client c has an update of length c + 1."""
    replies = []
    for c in range(clients):
        before, after = updates(c, c + 1.0)
        inbox = {**before, adaptive_bound.NAME: state.blocks[adaptive_bound.NAME]}
        replies.append(protection.protect(Reply(c, 9, after), inbox, WHEN, 9, secret))
    return protection.adapted(state, replies)


def bound(state: ServerState) -> float:
    return adaptive_bound.bound_of(state.blocks, ADAPTIVE)


@pytest.mark.parametrize("quantile", [0.25, 0.75])
def test_the_bound_goes_to_the_quantile_of_the_lengths(quantile):
    """From far below it and from far above."""
    for first in (0.5, 200.0):
        settings = replace(ADAPTIVE, update_quantile=quantile, update_bound=first)
        protection = Protection(settings, 0.05, 20)
        state = protection.with_bound(ServerState())
        assert bound(state) == first
        for secret in range(80):
            state = round_of(protection, state, 20, secret)
        assert bound(state) == pytest.approx(20 * quantile, rel=0.2)


def test_a_fixed_bound_stays():
    protection = Protection(CLIENT, 0.05, 40)
    state = protection.with_bound(ServerState())
    assert not state.blocks
    assert protection.adapted(state, []).blocks == {}


def test_the_clients_clip_to_the_bound_they_are_sent():
    protection = Protection(replace(ADAPTIVE, noise_multiplier=1e-6), 1e-6, 1)
    before, after = updates(0, 3.0)
    for length in (0.5, 2.0):
        state = adaptive_bound.with_bound(ServerState(), length)
        inbox = {**before, adaptive_bound.NAME: state.blocks[adaptive_bound.NAME]}
        sent = protection.protect(Reply(0, 9, after), inbox, WHEN, 9, 0)
        change = sent.blocks["head"].tensors["w"] - before["head"].tensors["w"]
        assert float(change.norm()) == pytest.approx(length, rel=1e-3)
        assert sent.notes[adaptive_bound.NOTE] == pytest.approx(-0.5, abs=1e-4)


def test_what_is_said_of_the_bound_is_paid_for():
    """The noise of update and statement together: Σ (Δ / deviation)² = 1/z². Without the statement the update would
    have less noise."""
    z, clients = 2.0, 4
    protection = Protection(ADAPTIVE, z, clients)
    before, after = updates(0, 3.0)
    changes, said = [], []
    for secret in range(1500):
        sent = protection.protect(Reply(0, 9, after), before, WHEN, 9, secret)
        changes.append(sent.blocks["head"].tensors["w"] - before["head"].tensors["w"])
        said.append(float(sent.notes[adaptive_bound.NOTE]))
    update = float(torch.stack(changes).double().std(0).mean()) * math.sqrt(clients)
    statement = float(np.std(said)) * math.sqrt(clients)
    spent = (ADAPTIVE.update_bound / update) ** 2 + (0.5 / statement) ** 2
    assert spent == pytest.approx(1 / z**2, rel=0.08)
    assert (0.5 / statement) ** 2 > 0.05 / z**2


def test_a_secure_sum_has_the_noise_of_both():
    settings = replace(ADAPTIVE, secure_sum=True, sum_threshold=0.99, update_bound=0.01)
    protection = Protection(settings, 2.0, 1)
    replies = {}
    for c in range(4):
        before, after = updates(c, 3.0)
        replies[c] = protection.protect(Reply(c, 9, after), before, WHEN, 9, 0)
        assert replies[c].notes == {adaptive_bound.NOTE: -0.5}  # in the clear until it is masked
    changes, said = [], []
    for seed in range(300):
        addends = (MODEL_MEANS, (), settings, seed, Channel(Ledger()), WHEN, protection)
        (total,) = sum_replies(replies, replies[0], *addends)
        assert total.samples == 4
        changes.append(4 * total.blocks["head"].tensors["w"])
        said.append(total.notes[adaptive_bound.NOTE])
    update = float(torch.stack(changes).double().std(0).mean())
    spent = (settings.update_bound / update) ** 2 + (0.5 / float(np.std(said))) ** 2
    assert spent == pytest.approx(1 / 2.0**2, rel=0.15)
    assert np.mean(said) == pytest.approx(-2.0, abs=0.7)


RUN = {"privacy__unit": "client", "warmup__rounds": 0, "setting": "homogeneous", "task_size": 5, "train__epochs": 2}


@pytest.mark.parametrize("secure", ["false", "true"])
def test_a_bound_that_is_far_too_small_is_mended(fresh: Callable, secure: str) -> None:
    """With almost no noise: FedAvg with a fixed bound of 1/1000 stays where it began."""
    more = {**RUN, "privacy__secure_sum": secure, "privacy__noise_multiplier": 1e-4, "privacy__update_bound": 1e-3}
    fixed = fresh("fedavg", **more, train__rounds=25)
    adapted = fresh("fedavg", **more, train__rounds=25, privacy__update_quantile=0.5)
    lengths = []
    for run in (fixed, adapted):
        start = run.server.weights()["base"]
        for round in range(25):
            run.play(0, round)
        end = run.server.weights()["base"]
        lengths.append(float(torch.stack([(end[n] - start[n]).double().norm() for n in start]).norm()))
    assert lengths[1] > 3 * lengths[0]
    assert bound(adapted.server) > 8e-3
    assert adaptive_bound.NAME not in fixed.server.blocks


def test_a_run_with_it_ends_at_its_budget_and_sends_the_bound(fresh: Callable) -> None:
    run = fresh("fedavg", **RUN, privacy__epsilon=4.0, privacy__update_quantile=0.5).stream()
    assert 3.0 < Meter(run.world.protection).spent(run.ledger.entries) <= 4.0 * (1 + 1e-6)
    plain = fresh("fedavg", **RUN, privacy__epsilon=4.0).stream()
    sent = sum(e.bytes for e in run.ledger.entries if e.direction == "down")
    without = sum(e.bytes for e in plain.ledger.entries if e.direction == "down")
    turns = len({(e.position, e.round, e.client) for e in run.ledger.entries if e.stage == "round"})
    assert sent - without == 8 * turns


def test_it_is_for_model_updates_of_clients(fresh: Callable) -> None:
    with pytest.raises(ConfigError, match=r"update_quantile is for model updates with privacy\.unit = client"):
        fresh("probayes", privacy__unit="example", privacy__epsilon=1.0, privacy__update_quantile=0.5)
