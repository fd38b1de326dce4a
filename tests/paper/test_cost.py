"""The cost formulas of the paper's appendix against the ledger of a run with `transfer = "full"`, to the byte."""

from __future__ import annotations

import numpy as np
import pytest

from profcil.metrics.client_first import summary
from profcil.metrics.ledger import stream_bytes

B = 4  # bytes per scalar
BASE_ROUNDS = 2
runs = pytest.mark.parametrize(
    ("method", "adapted"), [("pro", False), ("pro", True), ("promax", False), ("promax", True)], ids=str
)


def full(tiny, method, adapted):
    return tiny(method, transfer="full", adapted_bank=adapted)


def model_bytes(run) -> int:
    """b|Θ|: the bytes of base, adapter and head, including buffers."""
    tensors = [t for block in run.server.weights().values() for t in block.values()]
    assert all(t.is_floating_point() for t in tensors)
    return B * sum(t.numel() for t in tensors)


def turns(run) -> list[tuple[int, int, int]]:
    """Position, round and client of every turn."""
    plan = run.world.plan
    rounds = run.world.config.train.rounds
    return [(p, r, c) for p in range(plan.positions) for r in range(rounds) for c in run.clients(p, r)]


def recorded(run, stage: str, p: int, r: int, c: int) -> dict[tuple[str, str], int]:
    """Bytes of one turn by direction and kind, without headers."""
    rows = [e for e in run.ledger.entries if (e.stage, e.position, e.round, e.client) == (stage, p, r, c)]
    return {(e.direction, e.kind): e.bytes for e in rows if e.kind != "header"}


def nonzero(values: dict) -> dict:
    return {k: v for k, v in values.items() if v}


@runs
def test_the_cost_of_every_round_is_that_of_the_formulas(tiny, method, adapted):
    run = full(tiny, method, adapted)
    d = run.world.net.features
    before = run.before()
    theta = model_bytes(run)
    for p, r, c in turns(run):
        old = len(before[p, r].blocks["memory"].labels)
        memory = B * old * ((2 * d + 1) + adapted * (d + 2))
        spaces = (r < BASE_ROUNDS) + adapted  # while the base is frozen, only the adapted space moves
        transport = B * old * (d + 1) * spaces if method == "promax" else 0
        expected = {("down", "model"): theta, ("up", "model"): theta, ("down", "memory"): memory}
        assert recorded(run, "round", p, r, c) == nonzero(expected | {("up", "transport"): transport})
    assert any(len(s.blocks["memory"].labels) for s in before.values())


@runs
def test_the_refresh_uploads_the_statistics_of_current_classes(tiny, method, adapted):
    run = full(tiny, method, adapted)
    d = run.world.net.features
    last = run.world.config.train.rounds - 1
    for p, r, c in turns(run):
        current = len(run.world.plan.observed(c, p))
        statistics = B * current * ((2 * d + 1) + adapted * (d + 2))
        found = recorded(run, "refresh", p, r, c)
        assert found.get(("up", "statistics"), 0) == (statistics if r == last else 0)
        assert {k for k in found if k[0] == "up"} <= {("up", "statistics")}
        assert all(kind == "model" for direction, kind in found if direction == "down")


def test_fedavg_sends_the_model_and_nothing_else(tiny):
    run = tiny("fedavg", transfer="full")
    theta = model_bytes(run)
    for p, r, c in turns(run):
        assert recorded(run, "round", p, r, c) == {("down", "model"): theta, ("up", "model"): theta}
    assert run.ledger.total(stage="refresh") == 0
    assert run.ledger.total(stage="round", kind="model") == 2 * theta * len(turns(run))


def test_the_warmup_is_the_same_for_all_methods_and_not_part_of_the_stream(tiny):
    runs = [tiny(m, transfer="full") for m in ("fedavg", "pro", "promax")]
    warm = [[e for e in run.ledger.entries if e.stage == "warmup"] for run in runs]
    assert warm[0]
    assert warm[0] == warm[1] == warm[2]
    assert stream_bytes(runs[0].ledger.entries) == sum(e.bytes for e in runs[0].ledger.entries if e.stage != "warmup")


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("size", [16, 10_000])
def test_the_client_cache_is_the_calibration_subset(tiny, adapted, size):
    run = tiny("promax", transfer="full", adapted_bank=adapted, calibration=size)
    d = run.world.net.features
    before = run.before()
    plan = run.world.plan
    measured = [(p, c) for p, r, c in turns(run) if r < BASE_ROUNDS and before[p, r].blocks["memory"].labels]
    largest = max(min(size, len(plan.samples(c, p))) for p, c in measured)
    assert run.state.client_bytes == B * largest * (d + adapted * d)


def test_pro_needs_no_client_cache(tiny):
    assert tiny("pro", transfer="full").state.client_bytes == 0


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pro", "promax"])
def test_sending_only_changed_blocks_gives_the_same_bits(tiny, same_bits, method):
    full_run = tiny(method, transfer="full")
    changed = tiny(method, transfer="changed")
    assert same_bits(full_run.server, changed.server)
    assert np.array_equal(full_run.state.scores.correct, changed.state.scores.correct)
    orders = full_run.world.plan.orders
    assert summary(full_run.state.scores.correct, full_run.state.scores.total, orders) == summary(
        changed.state.scores.correct, changed.state.scores.total, orders
    )


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_a_frozen_base_is_not_sent_again(tiny, method):
    run = tiny(method, transfer="changed")
    assert stream_bytes(run.ledger.entries) < stream_bytes(tiny(method, transfer="full").ledger.entries)
    weights = run.server.weights()
    size = {b: B * sum(t.numel() for t in tensors.values()) for b, tensors in weights.items()}
    tail = size["adapter"] + size["head"]
    held = {}
    for p, r, c in turns(run):
        server = run.before()[p, r]
        found = recorded(run, "round", p, r, c)
        base = server.blocks["base"].version
        sends_tail = held.get((c, "tail")) != server.blocks["head"].version
        sends_base = held.get((c, "base")) != base
        assert found.get(("down", "model"), 0) == sends_base * size["base"] + sends_tail * tail
        assert found[("up", "model")] == tail + (size["base"] if r < BASE_ROUNDS else 0)
        held |= {(c, "base"): base, (c, "tail"): server.blocks["head"].version}
    assert any(r >= BASE_ROUNDS for _, r, _ in turns(run))
