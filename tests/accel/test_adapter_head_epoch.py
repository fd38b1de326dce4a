"""How phases with an analytic gradient are spread over threads: never stacked on a CPU, all cores used to the end, the
same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from profcil.accel import policy
from profcil.accel.acceleration import Acceleration
from profcil.config import TrainSettings
from profcil.data.bundle import Facts
from profcil.engine.phases import Batch, Features, Train
from profcil.model.losses import classification, cross_entropy
from profcil.model.net import TAIL, Net, Tail

WIDTH, CLASSES = 12, 7


def plain(tail: Tail, batch: Batch) -> Tensor:
    return cross_entropy(tail.classify(batch["u"]), batch["y"], batch["allowed"])


@pytest.fixture
def net() -> Net:
    base = nn.Linear(1, 1)
    base.features = WIDTH  # type: ignore[assignment]
    facts = Facts("toy", "Toy", "text", CLASSES, None, None)
    return Net(base, facts, generator=torch.Generator().manual_seed(0))


def phases_of(net: Net, count: int, loss=classification) -> list[Train]:
    settings = TrainSettings(optimiser="adam", lr=0.01, batch=8)
    return [phase_of(net, client, loss, settings) for client in range(count)]


def phase_of(net: Net, client: int, loss, settings: TrainSettings) -> Train:
    rng = torch.Generator().manual_seed(client)
    size = 20 + client
    source = Features(torch.randn(size, WIDTH, generator=rng), torch.randint(0, CLASSES, (size,), generator=rng))
    allowed = {"allowed": torch.ones(CLASSES, dtype=torch.bool)}
    return Train("rehearse", client, net.weights(TAIL), TAIL, loss, source, settings, 2, client, constants=allowed)


def alone(phases: Sequence[Train]) -> list[list[Train]]:
    return [[phase] for phase in phases]


def test_small_phases_are_stacked_only_without_an_analytic_gradient(net):
    assert not policy.may_be_grouped(net, phases_of(net, 1)[0], records=False, refused=False)
    assert policy.may_be_grouped(net, phases_of(net, 1, plain)[0], records=False, refused=False)
    groups = [Acceleration(net).groups(phases_of(net, 3, loss)) for loss in (classification, plain)]
    assert [[len(group) for group in found] for found in groups] == [[1, 1, 1], [3]]


@pytest.mark.parametrize(("clients", "threads"), [(1, 2), (3, 3), (7, 4), (8, 2), (9, 3), (13, 5)])
def test_the_last_clients_are_enough_for_all_cores(net, clients, threads):
    acceleration = Acceleration(net, workers=2)
    assert acceleration.threads(alone(phases_of(net, clients))) == threads
    assert acceleration.threads(alone(phases_of(net, clients, plain))) == 2  # they need a model, and there are two


def test_threads_change_no_bit(net):
    phases = phases_of(net, 7)
    one, many = (Acceleration(net, workers=n).run(phases) for n in (1, 2))
    for client in range(7):
        assert many[client].loss == one[client].loss and many[client].steps == one[client].steps
        for block in TAIL:
            assert all(torch.equal(many[client].weights[block][k], v) for k, v in one[client].weights[block].items())
