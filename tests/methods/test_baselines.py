"""FedAvg and FedProx: averaging by examples, the proximal term, the label space of the loss."""

from __future__ import annotations

import pytest
import torch

from profcil.engine.channel import Block, Reply
from profcil.methods.base import average


def drift(run, replies) -> float:
    """The sum of squared distances between the replies and the broadcast model."""
    start = run.server.weights()
    total = 0.0
    for reply in replies:
        for block, tensors in reply.weights().items():
            total += sum(float((t - start[block][k]).norm() ** 2) for k, t in tensors.items())
    return total


def test_averaging_is_weighted_by_examples():
    def reply(client: int, samples: int, value: float) -> Reply:
        return Reply(client, samples, {"head": Block("model", {"weight": torch.full((2,), value)})})

    assert average([reply(0, 1, 0.0), reply(1, 3, 4.0)])["head"]["weight"].tolist() == [3.0, 3.0]


def test_fedavg_averages_the_replies(fresh):
    run = fresh("fedavg")
    replies = run.turns(1, 0)
    assert len(replies) > 1
    total = sum(r.samples for r in replies)
    expected = sum(r.weights()["head"]["weight"] * (r.samples / total) for r in replies)
    torch.testing.assert_close(run.play(1, 0).weights()["head"]["weight"], expected)


def test_fedprox_stays_nearer_to_the_broadcast_model(fresh):
    runs = [fresh("fedavg"), fresh("fedprox", mu=0.1), fresh("fedprox", mu=5.0)]
    moved = [drift(run, run.turns(0, 0)) for run in runs]
    assert moved[0] > moved[1] > moved[2] > 0


def test_with_mu_zero_fedprox_is_fedavg_to_the_bit(tiny, same_bits):
    assert same_bits(tiny("fedprox", mu=0.0).server, tiny("fedavg").server)
    assert not same_bits(tiny("fedprox", mu=0.1).server, tiny("fedavg").server)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.parametrize("space", ["seen", "local"])
def test_the_loss_competes_over_the_chosen_classes_only(fresh, method, space):
    run = fresh(method, label_space=space, weight_decay=0.0)
    start = run.server.weights()["head"]["weight"]
    for reply in run.turns(1, 0):
        changed = (reply.weights()["head"]["weight"] != start).any(1).nonzero().flatten().tolist()
        seen = run.world.plan.seen(1)
        own = set(run.world.plan.observed(reply.client, 1))
        assert own < seen < set(range(10))
        trained = own if len(own) > 1 else set()  # with a single class there is no gradient
        assert set(changed) == (seen if space == "seen" else trained)
