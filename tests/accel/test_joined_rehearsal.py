"""The epochs of several clients drawn at once: each is balanced, and no client changes what another draws."""

from __future__ import annotations

import pytest
import torch

from profcil.accel.joined_rehearsal import JoinedRehearsal
from profcil.memory.bank import Bank
from profcil.memory.rehearsal import Rehearsal


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bank_of(ids: tuple[int, ...], d: int = 2) -> Bank:
    """Remembered classes far from all real features, so that a test can tell where a feature is from."""
    mean = 1000 + torch.arange(len(ids) * d, dtype=torch.float32).view(len(ids), d)
    return Bank(ids, mean, torch.ones(len(ids), d), torch.ones(len(ids), dtype=torch.int32))


def three_clients(factor: torch.Tensor | None = None) -> list[Rehearsal]:
    """Three clients of different sizes: with old classes, without, and with a class of a single example."""
    found = []
    for y, old in (([3] * 9 + [8] * 7, (3, 5, 6, 9)), ([11] * 5, ()), ([2] + [4] * 6 + [3] * 8, (8,))):
        labels = torch.tensor(y)
        features = (labels + torch.arange(len(y)) / 100)[:, None].expand(-1, 2).contiguous()
        bank = bank_of(old) if old else None
        found.append(Rehearsal(features, labels, bank, quota=4, noise=0.1, factor=factor))
    return found


def test_clients_together_each_have_a_balanced_epoch_of_their_own():
    clients = three_clients()
    joined = JoinedRehearsal(clients, 8)
    table = joined.epoch([rng(i) for i in range(3)])
    assert joined.steps == [3, 1, 2] and table["u"].shape == (3, 3, 8, 2) and table["y"].shape == (3, 3, 8)
    for row, client in enumerate(clients):
        u, y = table["u"][row].flatten(0, 1)[: client.size], table["y"][row].flatten()[: client.size]
        assert torch.equal(y.sort().values, client.y.sort().values)
        assert not torch.equal(y, client.y) or client.size == 4  # shuffled, unless there is one class
        real = torch.isin(y, client.real.classes)
        assert torch.equal(u[real][:, 0].long(), y[real])
        for label in client.real.classes:  # no example is repeated before all of its class are used
            drawn = u[y == label][:, 0].unique()
            assert len(drawn) == min(4, int((client.real.y == label).sum()))
        means = {int(k): m for k, m in zip(client.y[real.sum() :: 4], client.mean, strict=False)}
        assert all((f - means[int(k)]).abs().max() < 1 for f, k in zip(u[~real], y[~real], strict=True))


def test_clients_together_draw_with_the_shared_covariance():
    clients = three_clients(torch.tensor([[2.0, 0.0], [2.0, 0.0]]))  # both coordinates move together
    table = JoinedRehearsal(clients, 8).epoch([rng(i) for i in range(3)])
    for row, client in enumerate(clients):
        u, y = table["u"][row].flatten(0, 1)[: client.size], table["y"][row].flatten()[: client.size]
        means = dict(zip(client.y[len(client.real.labels) :: 4].tolist(), client.mean, strict=True))
        apart = [f - means[int(k)] for f, k in zip(u, y, strict=True) if int(k) in means]
        assert len(apart) == 4 * len(means)
        assert all(float((a[0] - a[1]).abs()) < 1e-3 < float(a.abs().max()) for a in apart)


@pytest.mark.parametrize("factor", [None, torch.tensor([[2.0, 0.0], [1.0, 1.0]])])
def test_other_clients_do_not_change_what_a_client_draws(factor):
    clients = three_clients(factor)
    joined, rngs = JoinedRehearsal(clients, 8), [rng(i) for i in range(3)]
    epochs = [joined.epoch(rngs) for _ in range(2)]
    assert not torch.equal(epochs[0]["u"], epochs[1]["u"])
    for row, client in enumerate(clients):
        alone, own = JoinedRehearsal([client], 8), rng(row)
        for epoch in epochs:
            found = alone.epoch([own])
            assert all(torch.equal(found[k][0], epoch[k][row, : alone.steps[0]]) for k in ("u", "y"))
