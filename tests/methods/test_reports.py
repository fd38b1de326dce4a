"""`refresh_at = "frozen"` of PRO and PRO-MAX: each client reports once while the base is frozen; all reports count."""

from __future__ import annotations

import pytest
import torch

from profcil.errors import ConfigError
from profcil.memory import linear
from profcil.memory.bank import measure
from profcil.memory.linear import unpack
from profcil.methods.parts.memory_blocks import bank_of
from profcil.methods.parts.pro_settings import ProParams

ROUNDS = 5
FREEZE = 1  # the last of two rounds in which the base moves
FROZEN = {"refresh_at": "frozen", "train__rounds": ROUNDS, "setting": "homogeneous"}
FEW = {**FROZEN, "participants": 2}  # of four clients with data
SHARED = {"covariance": "shared", "noise": 1.0}
METHODS = [("pro", {}), ("promax", {}), ("promax", {"transport": "global"}), ("promax", {"transport": "linear"})]


def reporters(run, position: int) -> list[int]:
    """The clients that take part in a round with a frozen base."""
    return sorted({c for r in range(FREEZE, ROUNDS) for c in run.clients(position, r)})


def played(run, position: int):
    """The server's state after the rounds of a position, before it ends."""
    for r in range(ROUNDS):
        run.play(position, r)
    return run.server


def close(run, position: int) -> None:
    run.state.server = run.method.end_position(run.server, run.when(position, ROUNDS - 1))
    run.world.forget_features()


def features_of(run, position: int, base, clients) -> tuple[torch.Tensor, torch.Tensor]:
    made = [run.client(c, position, 0) for c in clients]
    return torch.cat([c.features(dict(base.tensors)) for c in made]), torch.cat([c.y for c in made])


@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_the_memory_is_of_all_clients_that_took_part_while_the_base_was_frozen(fresh, method, settings):
    run = fresh(method, **FEW, **SHARED, **settings)
    state = played(run, 0)
    clients = reporters(run, 0)
    assert len(clients) > len(run.clients(0, ROUNDS - 1))  # the last round alone would give less
    u, y = features_of(run, 0, state.blocks["base"], clients)
    expected = measure(u, y)
    bank = bank_of(state.blocks["memory"])
    assert bank.count.tolist() == expected.count.tolist()
    torch.testing.assert_close(bank.mean, expected.mean, rtol=1e-4, atol=1e-5)
    stored = state.blocks["covariance"].tensors
    assert int(stored["count"]) == len(u)
    cov = linear.within_class_covariance(linear.summarise(u, y))
    torch.testing.assert_close(unpack(stored["matrix"]), cov, rtol=1e-3, atol=1e-4)


def test_the_linear_map_is_that_of_all_reports(fresh):
    run = fresh("promax", transport="linear", **FEW)
    played(run, 0)
    close(run, 0)
    start = run.server
    state = played(run, 1)
    clients = reporters(run, 1)
    assert len(clients) > len(run.clients(1, FREEZE))
    before, _ = features_of(run, 1, start.blocks["base"], clients)
    after, _ = features_of(run, 1, state.blocks["base"], clients)
    rows = linear.drift_rows(before, after)
    shift, _ = linear.fit_drift(linear.split_drift(rows.T @ rows, before.shape[1]), 0.01)
    old = bank_of(start.blocks["memory"])
    now = bank_of(state.blocks["memory"])
    kept = now.mean[[now.labels.index(y) for y in old.labels]]
    torch.testing.assert_close(kept.double(), linear.carried_means(old.mean, shift), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_with_all_clients_in_each_round_it_is_a_refresh_when_the_base_is_frozen(tiny, same_bits, method, settings):
    all_clients = {"participants": 4, "train__rounds": 3, "setting": "homogeneous", **SHARED, **settings}
    runs = [tiny(method, refresh_at=at, **all_clients) for at in ("frozen", "freeze")]
    assert same_bits(*(run.server for run in runs))


def test_each_client_reports_once(tiny):
    run = tiny("pro", **FEW)
    d = run.world.net.features
    entries = [e for e in run.ledger.entries if (e.direction, e.kind, e.stage) == ("up", "statistics", "refresh")]
    found = sorted((e.position, e.client) for e in entries if e.bytes)
    assert found == [(p, c) for p in range(run.world.plan.positions) for c in reporters(run, p)]
    assert {e.bytes for e in entries if e.bytes} == {2 * (2 * d + 1) * 4}  # two classes


def test_nothing_of_the_reports_is_left_after_a_position(tiny):
    run = tiny("promax", transport="linear", **SHARED, **FEW)
    assert set(run.server.blocks) == {"base", "adapter", "head", "memory", "covariance", "starting_base"}


def test_local_statistics_are_refused():
    with pytest.raises(ConfigError, match="refresh"):
        ProParams(refresh_at="frozen", refresh="local")
