"""Statistics that arrive late: they are added, and carried to the present base by what has moved the memory since."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from profcil.engine.channel import Block, Reply, ServerState, When
from profcil.engine.late import LateStatistics, expect_late, record_move
from profcil.memory import linear, linear_drift, symmetric
from profcil.memory.bank import Moments, bank_from_moments, measure, pool
from profcil.memory.transport import local_transport
from profcil.methods.parts.late_reports import note_merged
from profcil.methods.parts.memory_blocks import bank_of, block_of, block_of_moments, extended_bank
from profcil.methods.parts.summaries import report, summary_of_report
from profcil.methods.pro import Pro
from profcil.methods.prolin import ProLin
from profcil.methods.promax import ProMax

D = 4
BUFFER = {
    "clock__mode": "buffer",
    "clock__stragglers": 0.25,
    "clock__spread": 0.5,
    "clock__buffer": 1,
    "clock__statistics": 0.25,
}


def draw(count: int, seed: int, label: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=rng) + label, torch.full((count,), label)


def moments(count: int, seed: int, *labels: int) -> Moments:
    return pool([measure(*draw(count, 10 * seed + y, y)) for y in labels])


def late(found: Moments, position: int, version: int = 1, client: int = 0) -> LateStatistics:
    reply = Reply(client, 5, {"memory_moments": block_of_moments(found)})
    return LateStatistics(reply, When("refresh", position, 1, 2), version)


def memory_state(*found: Moments) -> ServerState:
    base = Block("model", {"w": torch.zeros(1)})
    memory = block_of(bank_from_moments(pool(list(found))))
    return ServerState().put(base=base).put(memory=memory).put(late_statistics=Block("memory", {}))


def at(position: int, round: int = 0) -> When:
    return When("round", position, round, 2)


def close(one: Block, other: Block) -> bool:
    return one.labels == other.labels and all(
        torch.allclose(one.tensors[k].double(), other.tensors[k].double(), atol=1e-5) for k in one.tensors
    )


# -- PRO ---------------------------------------------------------------------------------------------------------------


def test_late_statistics_are_pooled_with_those_of_their_position():
    """As if they had been in time."""
    first, second = moments(5, 1, 2, 3), moments(7, 2, 3, 6)
    method = Pro(Pro.Params())
    state = method.add_statistics(memory_state(first), [late(second, 4)], {2: 4, 3: 4}, at(5))
    assert close(state.blocks["memory"], block_of(bank_from_moments(pool([first, second]))))


def test_the_order_in_which_statistics_arrive_does_not_matter():
    method = Pro(Pro.Params())
    parts = [moments(count, count, 3, label) for count, label in ((4, 0), (5, 1), (6, 0))]
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        state, measured = memory_state(moments(9, 9, 7)), {7: 0}
        for number in order:
            state = method.add_statistics(state, [late(parts[number], 4)], measured, at(5))
            measured = measured | dict.fromkeys(parts[number].labels, 4)
        found.append(state.blocks["memory"])
    together = method.add_statistics(
        memory_state(moments(9, 9, 7)), [late(part, 4) for part in parts], {7: 0}, at(5)
    ).blocks["memory"]
    assert close(found[0], found[1]) and close(found[0], together)


@pytest.mark.parametrize("merge", ["replace", "counts"])
@pytest.mark.parametrize("measured", [3, 5])
def test_statistics_of_two_positions_are_merged_as_the_setting_says(merge, measured):
    """The memory has class 3 of position `measured`, and statistics of position 4 arrive."""
    stored, fresh = moments(5, 1, 3), moments(7, 2, 3)
    newest = stored if measured > 4 else fresh
    expected = pool([stored, fresh]) if merge == "counts" else newest
    found = extended_bank(block_of(bank_from_moments(stored)), {4: [fresh]}, {3: measured}, merge)
    assert close(found, block_of(bank_from_moments(expected)))


def test_pro_takes_late_statistics_as_they_are():
    fresh = moments(5, 1, 3)
    assert Pro(Pro.Params()).carried(memory_state(fresh), fresh, 0) is fresh


def test_statistics_that_were_not_sent_change_nothing():
    state = memory_state(moments(5, 1, 3))
    empty = LateStatistics(Reply(0, 5), When("refresh", 0, 1, 2), 1)
    assert Pro(Pro.Params()).add_statistics(state, [empty], {}, at(1)) is state


def test_a_shared_covariance_counts_late_examples(fresh):
    run = fresh("pro", covariance="shared", **BUFFER).stream()
    plan = run.world.plan
    counted = int(run.server.blocks["covariance"].tensors["count"])
    assert 0 < counted <= len(plan.ids)


# -- PRO-MAX -----------------------------------------------------------------------------------------------------------


def moved_state(state: ServerState, shift: torch.Tensor) -> ServerState:
    """The state after an update of the base, by which all remembered means have moved."""
    bank = bank_of(state.blocks["memory"])
    state = state.put(base=Block("model", {"w": torch.ones(1)}))
    state = record_move(state, {"mean": bank.mean, "shift": shift}, bank.labels)
    return state.put(memory=block_of(bank.shifted(shift)))


def test_late_means_move_as_their_classes_did_in_the_memory():
    state = memory_state(moments(5, 1, 2, 3))
    version = state.blocks["base"].version
    shifts = torch.tensor([[1.0] * D, [-2.0] * D])
    for _ in range(2):
        state = moved_state(state, shifts)
    fresh = moments(7, 2, 2, 3)
    method = ProMax(ProMax.Params())
    carried = method.carried(state, fresh, version)
    assert torch.allclose(carried.mean, fresh.mean + 2 * shifts, atol=1e-5)
    spread = bank_from_moments(carried).spread
    assert torch.allclose(spread, bank_from_moments(fresh).spread, atol=1e-3)
    assert method.carried(state, fresh, state.blocks["base"].version) is fresh
    joined = method.add_statistics(state, [late(fresh, 4, version)], {2: 4, 3: 4}, at(5))
    pooled = bank_from_moments(pool([bank_of(state.blocks["memory"]).moments(), carried]))
    assert close(joined.blocks["memory"], block_of(pooled))


def test_a_class_that_the_memory_lacked_moves_like_the_means_near_it():
    """With the transport of the method: as calibration features would move it."""
    state = memory_state(moments(5, 1, 2, 3))
    version = state.blocks["base"].version
    before = bank_of(state.blocks["memory"]).mean
    shifts = torch.tensor([[1.0] * D, [3.0] * D])
    state = moved_state(state, shifts)
    fresh = moments(7, 2, 5)
    carried = ProMax(ProMax.Params()).carried(state, fresh, version)
    expected, _ = local_transport(fresh.mean, before, before + shifts, neighbours=5)
    assert torch.allclose(carried.mean, fresh.mean + expected, atol=1e-5)
    assert 1.0 < float(expected.mean()) < 3.0


def test_a_map_moves_all_late_means():
    state = memory_state(moments(5, 1, 2))
    version = state.blocks["base"].version
    matrix = torch.randn(D + 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = record_move(state.put(base=Block("model", {"w": torch.ones(1)})), {"map": matrix})
    fresh = moments(7, 2, 2, 5)
    carried = ProMax(ProMax.Params()).carried(state, fresh, version)
    assert torch.allclose(carried.mean.double(), linear_drift.carried_means(fresh.mean, matrix), atol=1e-4)


def test_shifts_of_a_stale_reply_have_its_weight_and_end_when_the_base_is_frozen():
    shift = Block("transport", {"shift": torch.ones(2, D), "confidence": torch.ones(2)}, (2, 3))
    reply = Reply(0, 5, {"memory_transport": shift, "head": Block("model", {"w": torch.ones(1)})})
    method = ProMax(ProMax.Params(base_rounds=1))
    moving = method.rebased(reply, 0.5, at(3, 0)).blocks["memory_transport"].tensors
    assert torch.equal(moving["shift"], torch.full((2, D), 0.5))
    assert torch.equal(moving["confidence"], torch.ones(2))
    assert method.rebased(reply, 0.5, at(3, 1)).blocks.keys() == {"head"}


@pytest.mark.parametrize("settings", [{}, {"transport": "linear", "covariance": "shared", "closed_head": "true"}])
def test_promax_runs_with_late_statistics_and_carries_them(settings, fresh, monkeypatch):
    """Some of them are really moved."""
    slower = {"clock__stragglers": 0.5, "clock__slowdown": 12.0, "clock__statistics": 0.0}
    made = fresh("promax", noise=1.0, **{**BUFFER, **slower}, **settings)
    missed: list[int] = []
    original = ProMax.moved

    def moved(self: ProMax, bank: Any, move: Block) -> Any:
        missed.append(len(bank))
        return original(self, bank, move)

    monkeypatch.setattr(ProMax, "moved", moved)
    made.stream()
    assert made.state.tally["late_statistics"] > 0
    assert missed or settings  # by one map late means are moved once a position, which few of them miss
    assert set(made.server.blocks["memory"].labels) <= set(made.world.plan.seen(made.world.plan.positions - 1))


# -- PRO-LIN -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "frozen"),
    [
        ("prolin", {"base_rounds": 0}),
        ("prolin", {"base_rounds": 0, "moments": "sketch", "sketch_rank": 8}),
        ("prolin", {"base_rounds": 0, "moments": "none"}),
        ("probayes", {}),
    ],
)
def test_without_a_moving_base_what_is_remembered_does_not_depend_on_the_order(method, frozen, fresh):
    """All clients report in both runs, so the sums are the same up to rounding."""
    all_clients = {"stream__participants": 4, "train__rounds": 8, "dictionary": 64}
    milder = {**BUFFER, "clock__statistics": 0.0, "clock__spread": 0.0, "clock__buffer": 2}
    wait, buffer = (fresh(method, **all_clients, **frozen, **more).stream() for more in ({}, milder))
    assert buffer.state.tally["late_statistics"] > 0
    names = ("bank", "bank_gram") if method == "prolin" else ("class_sums",)
    for name in names:
        one, other = wait.server.blocks[name], buffer.server.blocks[name]
        assert one.labels == other.labels
        for key, tensor in one.tensors.items():
            assert torch.allclose(tensor.double(), other.tensors[key].double(), rtol=1e-4, atol=1e-3), (name, key)


def prolin_state(*labels: int) -> tuple[ProLin, ServerState]:
    """A method without anchor, and a state with some classes in memory."""
    method = ProLin(ProLin.Params(anchor=False))
    scale = torch.ones(D)
    state = method.begin({"base": {"w": torch.ones(1)}, "adapter": {"scale": scale}, "head": {"w": torch.ones(1)}})
    for label in labels:
        state = method.put_memory(state, linear.add(method.memory(state), linear.summarise(*draw(6, label, label))))
    return method, expect_late(state)


def closing_report(client: int, position: int, version: int, *, opening: bool = False) -> LateStatistics:
    """Of class 8, with the change of features that closing reports have."""
    features, y = draw(9, client, 8)
    columns = features if opening else torch.cat([features, 0.1 * features], 1)
    return LateStatistics(Reply(client, 9, report(columns, y)), When("refresh", position, 1, 2), version, opening)


def drifted(state: ServerState) -> tuple[ServerState, torch.Tensor, torch.Tensor]:
    """The state after the end of a position that has moved the base."""
    rng = torch.Generator().manual_seed(5)
    matrix = 0.1 * torch.randn(D + 1, D, dtype=torch.float64, generator=rng)
    residual = torch.eye(D, dtype=torch.float64)
    state = state.put(base=Block("model", {"w": torch.zeros(1)}))
    return record_move(state, {"map": matrix, "residual": residual}), matrix, residual


def same_summary(one: linear.Summary, other: linear.Summary) -> bool:
    pairs = ((one.count, other.count), (one.mean, other.mean), (one.gram, other.gram))
    return one.labels == other.labels and all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in pairs)


def test_a_late_report_joins_the_memory_through_the_maps_that_it_has_missed():
    """As if it had been in the memory while this was carried, once and again."""
    method, state = prolin_state(1, 2)
    version = state.blocks["base"].version
    sent = closing_report(3, 0, version)
    in_time = linear.add(method.memory(state), linear.select_features(summary_of_report(sent.reply.blocks), range(D)))
    for _ in range(2):
        state, matrix, residual = drifted(state)
        state = method.put_memory(state, linear_drift.apply_drift(method.memory(state), matrix, residual))
        in_time = linear_drift.apply_drift(in_time, matrix, residual)
    joined = method.add_statistics(state, [sent], {}, at(2))
    assert same_summary(method.memory(joined), in_time)
    assert 8 in joined.blocks["known_classes"].labels


def test_a_late_report_under_the_present_base_is_added_as_it_is():
    method, state = prolin_state(1)
    sent = closing_report(3, 0, state.blocks["base"].version)
    joined = method.add_statistics(state, [sent], {}, at(1))
    own = linear.select_features(summary_of_report(sent.reply.blocks), range(D))
    assert same_summary(method.memory(joined), linear.add(method.memory(state), own))


def test_no_example_counts_twice_where_the_opening_report_stood_in_for_a_late_one():
    method, state = prolin_state(1)
    version = state.blocks["base"].version
    state = note_merged(note_merged(state, {3}, at(0)), {5}, at(1))
    for client, position, is_counted in ((3, 0, True), (3, 1, False), (5, 1, True), (4, 0, False)):
        joined = method.add_statistics(state, [closing_report(client, position, version)], {}, at(2))
        assert (joined is state) == is_counted
    opening = closing_report(3, 0, version, opening=True)
    assert method.add_statistics(state, [opening], {}, at(2)) is not state


def test_reports_of_the_present_position_are_kept_as_those_in_time():
    method, state = prolin_state(1)
    version = state.blocks["base"].version
    state = method.add_statistics(state, [closing_report(3, 1, version)], {}, at(1, 1))
    assert method.reported(state) == [3]
    assert method.memory(state).labels == (1,)
    state = method.add_statistics(state, [closing_report(4, 1, version, opening=True)], {}, at(1, 1))
    assert "opening/4/class_means" in state.blocks


def test_nothing_is_noted_where_no_late_statistics_are_expected():
    _, state = prolin_state(1)
    plain = state.drop("late_statistics")
    assert note_merged(plain, {3}, at(0)) is plain
    assert record_move(plain, {"map": torch.ones(1)}) is plain


@pytest.mark.parametrize("base_rounds", [1, -1])
def test_prolin_with_a_moving_base_counts_every_example_once(base_rounds, fresh):
    """However late the reports are. The server ends with the sums of those clients whose reports have arrived."""
    made = fresh("prolin", base_rounds=base_rounds, train__rounds=4, stream__support=1.0, **BUFFER).stream()
    assert made.state.tally["late_statistics"] > 0
    count = made.server.blocks["bank"].tensors["count"]
    totals = torch.bincount(made.world.bundle.train.y)
    for label, number in zip(made.server.blocks["bank"].labels, count.tolist(), strict=True):
        assert 0 < number <= int(totals[label])
    gram = symmetric.unpack(made.server.blocks["bank_gram"].tensors["gram"])
    assert float(gram[-1, -1]) == pytest.approx(float(count.sum()), rel=1e-3)


def test_probayes_lets_a_client_report_again_whose_earlier_report_is_late(fresh):
    run = fresh("probayes", dictionary=64, **BUFFER)
    client = run.client(run.clients(0, 0)[0], 0, 0)
    reply = run.method.survey(client, {"dictionary": run.server.blocks["dictionary"]})
    asked = replace(run.when(0, 0), stage="refresh")
    state = run.method.add_statistics(run.server, [LateStatistics(reply, asked, 0)], {}, run.when(1, 0))
    assert run.method.reported(state) == []
    assert state.blocks["class_sums"].labels == tuple(sorted(client.labels))
    now = run.method.add_statistics(run.server, [LateStatistics(reply, asked, 0)], {}, run.when(0, 1))
    assert run.method.reported(now) == [client.id]
