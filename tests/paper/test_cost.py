"""The appendix's cost formulas, to the byte, against the ledger of a real run with `transfer = "full"`."""

from __future__ import annotations

import numpy as np
import pytest

from profcil.metrics.client_first import summary
from profcil.metrics.ledger import norm_comm, stream_bytes

B = 4  # bytes per scalar
BASE_ROUNDS = 2
runs = pytest.mark.parametrize(
    ("method", "adapted"), [("pro", False), ("pro", True), ("promax", False), ("promax", True)], ids=str
)


def full(tiny, method, adapted):
    return tiny(method, transfer="full", adapted_bank=adapted)


def model_bytes(run) -> int:
    """b|Θ|: all floating state of base, adapter and head, buffers included."""
    tensors = [t for block in run.server.weights().values() for t in block.values()]
    assert all(t.is_floating_point() for t in tensors)
    return B * sum(t.numel() for t in tensors)


def cells(run) -> list[tuple[int, int, int]]:
    plan, rounds = run.world.plan, run.world.config.train.rounds
    return [(p, r, c) for p in range(plan.positions) for r in range(rounds) for c in run.clients(p, r)]


def booked(run, stage: str, p: int, r: int, c: int) -> dict[tuple[str, str], int]:
    rows = [e for e in run.ledger.entries if (e.stage, e.position, e.round, e.client) == (stage, p, r, c)]
    return {(e.direction, e.kind): e.bytes for e in rows if e.kind != "header"}


def nonzero(values: dict) -> dict:
    return {k: v for k, v in values.items() if v}


@runs
def test_every_round_costs_what_the_formulas_say(tiny, method, adapted):
    run = full(tiny, method, adapted)
    d, before, theta = run.world.net.features, run.before(), model_bytes(run)
    for p, r, c in cells(run):
        old = len(before[p, r].blocks["memory"].labels)
        memory = B * old * ((2 * d + 1) + adapted * (d + 2))
        spaces = (r < BASE_ROUNDS) + adapted  # in frozen rounds only the adapter moves
        transport = B * old * (d + 1) * spaces if method == "promax" else 0
        expected = {("down", "model"): theta, ("up", "model"): theta, ("down", "memory"): memory}
        assert booked(run, "round", p, r, c) == nonzero(expected | {("up", "transport"): transport})
    assert any(len(s.blocks["memory"].labels) for s in before.values())


@runs
def test_the_refresh_sends_up_the_moments_of_current_classes(tiny, method, adapted):
    run = full(tiny, method, adapted)
    d, last = run.world.net.features, run.world.config.train.rounds - 1
    for p, r, c in cells(run):
        current = len(run.world.plan.observed(c, p))
        statistics = B * current * ((2 * d + 1) + adapted * (d + 2))
        found = booked(run, "refresh", p, r, c)
        assert found.get(("up", "statistics"), 0) == (statistics if r == last else 0)
        assert {k for k in found if k[0] == "up"} <= {("up", "statistics")}
        assert all(kind == "model" for direction, kind in found if direction == "down")


def test_fedavg_sends_the_model_and_nothing_else(tiny):
    run = tiny("fedavg", transfer="full")
    theta = model_bytes(run)
    for p, r, c in cells(run):
        assert booked(run, "round", p, r, c) == {("down", "model"): theta, ("up", "model"): theta}
    assert run.ledger.total(stage="refresh") == 0
    assert run.ledger.total(stage="round", kind="model") == 2 * theta * len(cells(run))


def test_the_warm_up_is_booked_apart_and_the_same_for_all(tiny):
    runs = [tiny(m, transfer="full") for m in ("fedavg", "pro", "promax")]
    warm = [[e for e in run.ledger.entries if e.stage == "warmup"] for run in runs]
    assert warm[0]
    assert warm[0] == warm[1] == warm[2]
    assert stream_bytes(runs[0].ledger.entries) == sum(e.bytes for e in runs[0].ledger.entries if e.stage != "warmup")


def test_norm_comm_is_one_ledger_by_another(tiny):
    fedavg, pro = (stream_bytes(tiny(m, transfer="full").ledger.entries) for m in ("fedavg", "pro"))
    assert norm_comm(fedavg, fedavg) == 1.0
    assert norm_comm(pro, fedavg) == pro / fedavg > 1.0
    assert np.isnan(norm_comm(1, 0))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("size", [16, 10_000])
def test_the_client_cache_is_the_calibration_subset(tiny, adapted, size):
    run = tiny("promax", transfer="full", adapted_bank=adapted, calibration=size)
    d, before, plan = run.world.net.features, run.before(), run.world.plan
    busy = [(p, c) for p, r, c in cells(run) if r < BASE_ROUNDS and before[p, r].blocks["memory"].labels]
    most = max(min(size, len(plan.samples(c, p))) for p, c in busy)
    assert run.state.client_bytes == B * most * (d + adapted * d)


def test_pro_needs_no_client_cache(tiny):
    assert tiny("pro", transfer="full").state.client_bytes == 0


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pro", "promax"])
def test_sending_only_changes_changes_no_bit_of_the_result(tiny, same_bits, method):
    whole, changed = tiny(method, transfer="full"), tiny(method, transfer="changed")
    assert same_bits(whole.server, changed.server)
    assert np.array_equal(whole.state.scores.correct, changed.state.scores.correct)
    orders = whole.world.plan.orders
    assert summary(whole.state.scores.correct, whole.state.scores.total, orders) == summary(
        changed.state.scores.correct, changed.state.scores.total, orders
    )


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_a_frozen_base_does_not_travel_again(tiny, method):
    run = tiny(method, transfer="changed")
    assert stream_bytes(run.ledger.entries) < stream_bytes(tiny(method, transfer="full").ledger.entries)
    weights = run.server.weights()
    size = {b: B * sum(t.numel() for t in tensors.values()) for b, tensors in weights.items()}
    tail, held = size["adapter"] + size["head"], {}
    for p, r, c in cells(run):
        server, found = run.before()[p, r], booked(run, "round", p, r, c)
        base = server.blocks["base"].version
        fresh_tail = held.get((c, "tail")) != server.blocks["head"].version
        fresh_base = held.get((c, "base")) != base
        assert found.get(("down", "model"), 0) == fresh_base * size["base"] + fresh_tail * tail
        assert found[("up", "model")] == tail + (size["base"] if r < BASE_ROUNDS else 0)
        held |= {(c, "base"): base, (c, "tail"): server.blocks["head"].version}
    assert any(r >= BASE_ROUNDS for _, r, _ in cells(run))
