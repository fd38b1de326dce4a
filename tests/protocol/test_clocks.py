"""Simulated clocks: a schedule follows from plan and settings, and its replies arrive when they should."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from profcil.errors import ConfigError
from profcil.protocol.buffered_clock import BufferedClock, ServerUpdate, TimedInterval
from profcil.protocol.clock_schedule import Schedule
from profcil.protocol.clock_settings import ClockSettings
from profcil.protocol.clocks import OPENING, STATISTICS, TURN, Clock, ClockState, Pending, Work
from profcil.protocol.plan import Plan, StreamSettings
from profcil.protocol.plan_making import make_plan
from profcil.runs.arrivals_state import unpack_clock

LABELS = np.arange(400) % 8
SEVERE = StreamSettings(clients=10, participants=4, task_size=2, support=0.6, coverage=0.5, disorder=0.6)
ALL = replace(SEVERE, support=1.0, coverage=1.0, disorder=0.0)
ROUNDS = 4


def made_plan(settings: StreamSettings = ALL, seed: int = 0) -> Plan:
    return make_plan(LABELS, 8, settings, seed)


def made_clock(plan: Plan | None = None, mode: str = "buffer", **settings: Any) -> BufferedClock:
    return BufferedClock(ClockSettings(mode=mode, **settings), plan or made_plan(), epochs=2)


def like_promax(position: int, round: int) -> Work:
    """The base moves in two rounds, and statistics follow them and the last round."""
    return Work(moves_base=round < 2, surveys=round in (1, ROUNDS - 1))


def made_schedule(clock: Clock, work: Any = like_promax) -> Schedule:
    return Schedule(clock, ROUNDS, work)


def updates(clock: Clock, work: Any = like_promax) -> list[ServerUpdate]:
    return list(made_schedule(clock, work).updates())


# -- durations ---------------------------------------------------------------------------------------------------------


def test_a_turn_lasts_as_long_as_its_examples_epochs_and_messages():
    clock = made_clock(latency=1.5, example_seconds=0.1)
    examples = clock.plan.counts[3, clock.plan.orders[3, 1]]
    assert clock.turn_seconds(3, 1, True) == pytest.approx(1.5 + 2 * 0.1 * examples)
    assert clock.turn_seconds(3, 1, False) == 1.5


def test_stragglers_are_as_many_and_as_slow_as_set():
    clock = made_clock(stragglers=0.3, slowdown=7.0)
    fast = made_clock()
    assert clock.slow.sum() == 3
    for client in range(10):
        expected = 7.0 if clock.slow[client] else 1.0
        assert clock.turn_seconds(client, 0, True) == pytest.approx(expected * fast.turn_seconds(client, 0, True))
    assert not made_clock().slow.any()
    assert made_clock(stragglers=1.0).slow.all()


def test_speeds_differ_by_the_spread_and_the_seed():
    plan = make_plan(LABELS, 8, replace(ALL, clients=400), 0)
    factors = made_clock(plan, spread=0.5).factors
    assert np.log(factors).std() == pytest.approx(0.5, abs=0.05)
    assert (factors != made_clock(make_plan(LABELS, 8, replace(ALL, clients=400), 1), spread=0.5).factors).all()
    assert (made_clock(plan).factors == 1).all()


def test_the_weakened_task_takes_less_time():
    plan = replace(made_plan(), settings=replace(ALL, weak_task=0, weak_strength="severe"))
    weak = Clock(ClockSettings(mode="wait"), plan, epochs=4, weak_epochs=0.25)
    full = Clock(ClockSettings(mode="wait"), plan, epochs=4)
    position = int(np.flatnonzero(plan.orders[0] == 0)[0])
    assert weak.turn_seconds(0, position, True) < full.turn_seconds(0, position, True)
    assert weak.turn_seconds(0, position + 1, True) == full.turn_seconds(0, position + 1, True)


def test_a_client_starts_in_its_part_of_the_day_only():
    clock = made_clock(available=0.25, day=100.0)
    for client in range(10):
        hours = [(t + clock.phases[client]) % 100 for t in range(0, 100, 7)]
        starts = [clock.available_from(client, float(t)) for t in range(0, 100, 7)]
        for t, hour, start in zip(range(0, 100, 7), hours, starts, strict=True):
            assert start == t if hour < 25 else start == pytest.approx(t + 100 - hour)


def test_replies_are_lost_as_often_as_set():
    clock = made_clock(dropout=0.3)
    lost = [clock.is_lost(TURN, client, update) for client in range(10) for update in range(200)]
    assert np.mean(lost) == pytest.approx(0.3, abs=0.04)
    assert not any(made_clock().is_lost(TURN, client, 0) for client in range(10))


# -- a synchronous round -----------------------------------------------------------------------------------------------


def test_a_synchronous_round_lasts_as_long_as_its_slowest_participant():
    clock = made_clock(mode="wait", stragglers=0.3)
    slow = int(np.flatnonzero(clock.slow)[0])
    fast = int(np.flatnonzero(~clock.slow)[0])
    work = Work(surveys=False)
    alone = clock.round(ClockState(), 0, 0, [fast], work).time
    assert alone == clock.turn_seconds(fast, 0, True)
    assert clock.round(ClockState(), 0, 0, [fast, slow], work).time == clock.turn_seconds(slow, 0, True) > alone


def test_a_synchronous_round_counts_statistics_and_what_is_asked_for_again():
    clock = made_clock(mode="wait")
    plain = clock.round(ClockState(), 0, 0, [0, 1], Work())
    surveyed = clock.round(ClockState(), 0, 0, [0, 1], Work(surveys=True))
    again = clock.round(surveyed, 0, 1, [0, 1], Work(moves_base=False, surveys=True))
    assert surveyed.time > plain.time
    assert again.time - surveyed.time < surveyed.time  # under the same base the features are known
    lossy = made_clock(mode="wait", dropout=0.9).round(ClockState(), 0, 0, [0, 1], Work())
    assert lossy.time > plain.time


def test_a_round_without_participants_takes_no_time():
    assert made_clock(mode="wait").round(ClockState(time=5.0), 0, 0, [], Work(surveys=True)).time == 5.0


# -- an asynchronous update --------------------------------------------------------------------------------------------


def test_the_server_updates_after_as_many_replies_as_set():
    for buffer in (1, 2, 3):
        for update in updates(made_clock(buffer=buffer, spread=0.5)):
            now = [p for p in update.arrived if p.what == TURN and p.position == update.after.position]
            assert len(now) >= buffer
            last = max(p.end for p in now)
            assert sum(p.end < last for p in now) < buffer or any(u.asked for u in [update])


def test_by_default_half_of_the_participants_are_enough():
    assert made_clock().needed(0) == 2
    assert made_clock(made_plan(replace(ALL, participants=5))).needed(0) == 3
    assert made_clock(buffer=7).needed(0) == 7


def test_as_many_clients_work_as_a_synchronous_round_has_participants():
    for update in updates(made_clock(spread=0.5)):
        working = [p for p in update.after.pending if p.what == TURN and p.position == update.after.position]
        assert len(working) <= 4
    assert len(updates(made_clock())[0].started) >= 4


def test_a_straggler_replies_to_a_later_update():
    clock = made_clock(stragglers=0.3, buffer=1)
    ages = Counter()
    for number, update in enumerate(updates(clock)):
        for p in update.arrived:
            if p.what == TURN:
                ages[bool(clock.slow[p.client])] = max(ages[bool(clock.slow[p.client])], number - p.update)
    assert ages[True] > ages[False]


def test_no_client_does_two_turns_at_once_or_starts_twice_from_one_model():
    busy: set[int] = set()
    for update in updates(made_clock(made_plan(SEVERE), spread=0.7, stragglers=0.2, dropout=0.1)):
        started = [p.client for p in update.started]
        assert len(started) == len(set(started))
        arrived = {p.client for p in update.arrived if p.what == TURN}
        assert not (set(started) & busy) - arrived
        busy = {p.client for p in update.after.pending if p.what == TURN}


def test_replies_of_an_earlier_position_do_not_count_towards_the_buffer():
    """At the start of a position most clients still work on the one before."""
    clock = made_clock(buffer=2, stragglers=0.5)
    found = updates(clock)
    mixed = [u for u in found if any(p.position < u.after.position for p in u.arrived if p.what == TURN)]
    assert mixed
    for update in mixed:
        assert sum(p.position == update.after.position for p in update.arrived if p.what == TURN) >= 2


def test_what_arrives_at_the_same_time_is_taken_together():
    clock = made_clock(buffer=1, example_seconds=0.0)
    assert len(updates(clock)[0].arrived) == 4


def test_a_buffer_larger_than_the_clients_waits_for_all_of_them():
    for update in updates(made_clock(buffer=1000)):
        senders = {p.client for p in update.arrived if p.what == TURN}
        assert senders == set(range(10))


def test_where_every_reply_is_lost_the_server_goes_on_without_any(monkeypatch):
    monkeypatch.setattr(Clock, "is_lost", lambda self, *address: True)
    found = updates(made_clock())
    assert len(found) == 4 * ROUNDS
    assert all(p.lost for u in found for p in (*u.arrived, *u.in_time))
    assert [u.after.time for u in found] == sorted(u.after.time for u in found)
    assert found[-1].after.time > 0


def test_a_lost_turn_makes_room_for_another():
    found = updates(made_clock(dropout=0.5))
    assert sum(p.lost for u in found for p in u.arrived) > 5
    assert all(sum(not p.lost and p.what == TURN for p in u.arrived) >= 1 for u in found)


def test_a_position_without_data_passes_at_once():
    plan = make_plan([0, 0], 2, StreamSettings(3, 2, 1), 0)
    (empty,) = [p for p, task in enumerate(plan.tasks) if task == (1,)]
    update = made_clock(plan).update(ClockState(time=3.0), empty, 0, Work(surveys=True), False)
    assert (update.started, update.arrived, update.asked, update.after.time) == ([], [], [], 3.0)


def test_at_night_no_client_starts():
    clock = made_clock(available=0.05, day=1000.0)
    for update in updates(clock)[:3]:
        for p in update.started:
            begin = p.end - clock.turn_seconds(p.client, p.position, True)
            assert clock.available_from(p.client, begin) == pytest.approx(begin, abs=1e-6)
    assert updates(clock)[-1].after.time > updates(made_clock())[-1].after.time


# -- statistics --------------------------------------------------------------------------------------------------------


def test_every_client_that_has_replied_is_asked_once_under_a_base():
    asked: Counter[tuple[int, int]] = Counter()
    replied: dict[int, set[int]] = {}
    for update in updates(made_clock(made_plan(SEVERE), stragglers=0.3, spread=0.5)):
        position = update.after.position
        replied[position] = set(update.after.replied)
        asked.update((p.position, p.client) for p in update.asked)
    assert set(asked.values()) == {1}
    assert {(position, c) for position, clients in replied.items() for c in clients} <= set(asked)


def test_one_whose_turn_arrives_after_its_position_is_asked_then_for_statistics_of_that_position():
    """It could not be asked before. At the end of the stream those are asked that still work."""
    clock = made_clock(stragglers=0.3, slowdown=12.0)
    found = updates(clock)
    overdue = [(u, p) for u in found for p in u.asked if p.position < u.after.position]
    assert overdue
    for update, p in overdue:
        turns = (*update.arrived, *update.after.pending)
        assert any(t.client == p.client and t.position == p.position and t.what == TURN for t in turns)
        assert p.round == ROUNDS - 1
    answered = {(p.position, p.client) for u in found for p in (*u.arrived, *u.in_time) if p.what == STATISTICS}
    took_part = {(p.position, p.client) for u in found for p in u.started}
    assert answered == took_part


def test_one_who_replies_after_the_survey_is_asked_then():
    """In a round in which the method asks for no statistics, so the server does not wait."""
    between = [u for u in updates(made_clock(spread=1.0)) if u.after.surveyed == 1 and u.asked]
    assert between
    later = [u for number, u in enumerate(updates(made_clock(spread=1.0))) if number % ROUNDS == 2 and u.asked]
    assert later and all(u.in_time == [] for u in later)


def test_the_server_waits_for_the_share_of_statistics_that_is_set():
    def first_survey(share: float) -> ServerUpdate:
        return updates(made_clock(spread=1.0, statistics=share))[1]

    patient = first_survey(1.0)
    hasty = first_survey(0.0)
    idle = [p for p in patient.asked if p.end <= patient.after.time]
    assert patient.after.time > hasty.after.time
    assert hasty.in_time == []
    assert {p.client for p in patient.in_time} == {p.client for p in idle} != set()


def test_at_the_end_of_the_stream_the_server_waits_for_all_statistics():
    clock = made_clock(spread=1.0, stragglers=0.3, statistics=0.0)
    found = updates(clock)
    assert any(p.what == STATISTICS for p in found[ROUNDS - 1].after.pending)
    assert all(p.what == TURN for p in found[-1].after.pending)


def test_late_statistics_arrive_at_a_later_update_or_position():
    found = updates(made_clock(spread=1.0, stragglers=0.3, statistics=0.25))
    late = [
        (u.after.position, p)
        for number, u in enumerate(found)
        for p in (*u.arrived, *u.in_time)
        if p.what == STATISTICS and p.update < number
    ]
    assert any(p.position < position for position, p in late)
    assert made_schedule(made_clock(spread=1.0, stragglers=0.3, statistics=0.25)).summary().late_statistics == len(late)


def test_lost_statistics_are_asked_for_again(monkeypatch):
    first = [True]

    def lost_once(self: Clock, what: str, *address: object) -> bool:
        return what == STATISTICS and first == [True] and not first.clear()

    monkeypatch.setattr(Clock, "is_lost", lost_once)
    found = updates(made_clock(), lambda position, round: Work(moves_base=False, surveys=True))
    (client,) = [p.client for u in found for p in (*u.in_time, *u.arrived) if p.lost]
    assert sum(p.client == client and p.position == 0 for u in found for p in u.asked) == 2


def test_a_method_that_opens_a_position_is_given_statistics_before_its_turns():
    def opening(position: int, round: int) -> Work:
        return Work(opens=True, surveys=round == ROUNDS - 1)

    found = updates(made_clock(stragglers=0.3), opening)
    for number, update in enumerate(found):
        if number % ROUNDS:
            assert update.opening == []
            continue
        assert len(update.opening) == 4 and {p.what for p in update.opening} == {OPENING}
        assert update.opened
        begin = min(p.end - made_clock(stragglers=0.3).turn_seconds(p.client, p.position, True) for p in update.started)
        assert begin >= max(p.end for p in update.opened if p.what == OPENING) - 1e-9


# -- purity ------------------------------------------------------------------------------------------------------------


def test_the_schedule_is_a_pure_function_of_plan_and_settings():
    settings = {"spread": 0.5, "stragglers": 0.3, "dropout": 0.1, "available": 0.5, "day": 50.0}
    one, same = (updates(made_clock(made_plan(SEVERE, 3), **settings)) for _ in range(2))
    assert one == same
    assert one != updates(made_clock(made_plan(SEVERE, 4), **settings))
    assert one != updates(made_clock(made_plan(SEVERE, 3), **{**settings, "dropout": 0.2}))


def test_a_schedule_goes_on_from_a_state_that_was_written_as_json():
    clock = made_clock(made_plan(SEVERE), spread=0.5, stragglers=0.3, dropout=0.1)
    found = updates(clock)
    for number in (2, 5, ROUNDS):
        state = unpack_clock(json.loads(json.dumps(asdict(found[number - 1].after))))
        assert state == found[number - 1].after
        position, round = divmod(number, ROUNDS)
        assert clock.update(state, position, round, like_promax(position, round), False) == found[number]


def test_a_buffered_run_needs_less_time_than_a_synchronous_one_with_stragglers():
    schedule = made_schedule(made_clock(stragglers=0.3))
    assert schedule.summary().seconds < 0.6 * schedule.synchronous_seconds()


def test_too_old_replies_are_counted_as_such():
    clock = made_clock(stragglers=0.3, buffer=1, slowdown=20.0)
    limited = made_clock(stragglers=0.3, buffer=1, slowdown=20.0, max_staleness=2)
    assert made_schedule(clock).summary().expired == 0 < made_schedule(limited).summary().expired
    assert made_schedule(limited).summary().highest_staleness <= 2 < made_schedule(clock).summary().highest_staleness


def test_the_audit_says_who_is_slow_and_what_is_late():
    lines = made_schedule(made_clock(stragglers=0.3, statistics=0.0)).lines()
    text = "\n".join(lines)
    assert "3 of 10 clients" in text and "of a synchronous run" in text and "late statistics" in text
    assert len(made_schedule(made_clock(mode="wait")).lines()) == 2


def test_an_interval_does_not_wait_for_arrivals_that_cannot_help():
    """A client that works on the position before, and has no data of this one, does not hold the server up."""
    plan = made_plan(SEVERE)
    position = next(p for p in range(plan.positions) if len(plan.active(p)) < 10)
    idle = next(c for c in range(10) if c not in plan.active(position))
    slow = Pending(1e6, idle, TURN, position - 1, 0)
    state = ClockState(position=position, pending=(slow,))
    interval = TimedInterval(made_clock(plan, buffer=1000), state, plan.active(position).tolist(), True)
    interval.run()
    assert interval.time < 1e6 and interval.pending == [slow]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fast"},
        {"mode": "buffer", "latency": -1.0},
        {"mode": "buffer", "slowdown": 0.5},
        {"mode": "buffer", "stragglers": 1.5},
        {"mode": "buffer", "dropout": 1.0},
        {"mode": "buffer", "available": 0.0},
        {"mode": "buffer", "buffer": -1},
        {"mode": "buffer", "staleness": -0.5},
        {"mode": "buffer", "statistics": float("nan")},
        {"stragglers": 0.3},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(wrong):
    with pytest.raises(ConfigError):
        ClockSettings(**wrong)
