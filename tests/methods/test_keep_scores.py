"""`keep_scores` of PRO and PRO-MAX: the scores of remembered classes stay as they were at the start of a position."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.engine import steps
from profcil.model.losses import soft_cross_entropy
from profcil.model.net import Tail

LAST = 2  # the last of three rounds
BOTH = [{}, {"covariance": "shared", "closed_head": True, "keep_temperature": 5.0}]


def played(fresh, method: str = "pro", **settings):
    """A run after its first position."""
    run = fresh(method, **{"fit_space": "own", "auxiliary": 0.0, "setting": "homogeneous"} | settings)
    for r in range(LAST + 1):
        run.play(0, r)
    run.state.server = run.method.end_position(run.server, run.when(0, LAST))
    return run


def fitting(run, position: int, round: int):
    """A client, what it is sent, and its fitting phase."""
    client = run.client(run.clients(position, round)[0], position, round)
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, client.when)}
    return client, inbox, run.method.fit(client, inbox, plastic=True)


def starting_scores(run, inbox, u: Tensor) -> Tensor:
    """Scores of the head that the position started from, over all class ids."""
    head = inbox["starting_head"]
    if not head.labels:
        return Tail(inbox["starting_adapter"].tensors, head.tensors).classify(u)
    scores = torch.zeros(len(u), run.world.net.classes)
    scores[:, list(head.labels)] = F.linear(u, head.tensors["weight"], head.tensors["bias"])
    return scores / run.method.params.keep_temperature


@pytest.mark.parametrize(("settings", "strong"), [(BOTH[0], 20.0), (BOTH[1], 5.0)], ids=["trained", "closed"])
def test_fitting_changes_the_scores_of_remembered_classes_less(fresh, settings, strong):
    """A closed head is steep: with a weight of 20 steps become too long."""
    moved = {}
    for weight in (1e-9, strong):
        run = played(fresh, keep_scores=weight, proximal=0.0, **settings)
        client, inbox, phase = fitting(run, 1, 0)
        fitted = steps.run(run.world.net, replace(phase, epochs=5))
        old = [y for y in inbox["memory"].labels if y not in client.labels]
        bases = (inbox["base"].tensors, fitted.weights["base"])
        before, after = (starting_scores(run, inbox, client.features(b))[:, old].softmax(1) for b in bases)
        moved[weight] = float((after - before).abs().mean())
    assert moved[strong] < 0.5 * moved[1e-9]


@pytest.mark.parametrize("settings", BOTH, ids=["trained", "closed"])
def test_the_loss_is_the_formula(fresh, settings):
    run = played(fresh, keep_scores=3.0, augment=False, **settings)
    run.play(1, 0)  # now the broadcast base is another than the starting one
    client, inbox, phase = fitting(run, 1, 1)
    net = run.world.net
    net.load(phase.weights)
    net.eval()
    batch = {"inputs": client.examples.inputs(client.current), "y": client.y, "rng": torch.Generator()}
    u = client.features(inbox["base"].tensors)
    start = client.features(inbox["starting_base"].tensors)
    assert not torch.allclose(u, start)
    old = client.allowed(tuple(y for y in inbox["memory"].labels if y not in client.labels))
    own = Tail(inbox["adapter"].tensors, inbox["head"].tensors).classify(u)
    own = own.masked_fill(~client.allowed(client.labels), -torch.inf)
    kept = soft_cross_entropy(starting_scores(run, inbox, u), starting_scores(run, inbox, start), old)
    net.load(phase.weights)
    net.eval()
    with torch.no_grad():
        found = run.method.score_keeping_loss(net, batch | phase.constants)
    torch.testing.assert_close(found, F.cross_entropy(own, client.y) + 3.0 * kept, rtol=1e-4, atol=1e-4)


def test_the_target_is_the_same_in_all_rounds_of_a_position(fresh):
    run = played(fresh, "promax", keep_scores=1.0)
    start = run.server.weights()["base"]
    for r in range(2):
        _, inbox, _ = fitting(run, 1, r)
        assert all(torch.equal(inbox["starting_base"].tensors[k], t) for k, t in start.items())
        run.play(1, r)


def test_the_first_position_keeps_nothing(fresh):
    run = fresh("pro", keep_scores=1.0)
    _, inbox, phase = fitting(run, 0, 0)
    assert "starting_base" not in inbox
    assert phase.loss != run.method.score_keeping_loss


@pytest.mark.parametrize("settings", BOTH, ids=["trained", "closed"])
def test_reference_and_default_path_agree(fresh, max_difference, settings):
    runs = [played(fresh, keep_scores=2.0, accelerate=way, **settings) for way in ("off", "auto")]
    for run in runs:
        for r in range(LAST + 1):
            run.play(1, r)
    assert max_difference(*(run.server for run in runs)) < 1e-2
