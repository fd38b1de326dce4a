"""Runs with simulated clocks: late replies are re-based, weighted, kept and counted, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import events, outcome, tiny

from profcil.cli.main import main
from profcil.contract.case import MethodCase
from profcil.engine import recorder, run
from profcil.engine.arrivals import Arrivals, make_clock, planned_work
from profcil.engine.buffered_round import Asked, BufferedRound
from profcil.engine.channel import Block, Channel, Reply, ServerState, When
from profcil.engine.executor import Executor
from profcil.engine.late import expect_late, forget_moves, moves_since, record_move, recorded_moves
from profcil.engine.rebase import completed, rebased, staleness_weight
from profcil.engine.run_state import RunState
from profcil.engine.timed_deliveries import TimedDeliveries
from profcil.errors import ConfigError
from profcil.metrics.ledger import Ledger
from profcil.protocol.clock_schedule import Schedule
from profcil.protocol.clocks import TURN, ClockState, Pending
from profcil.resolve import resolve, to_toml, values_of
from profcil.runs.arrivals_state import pack_arrivals, unpack_arrivals

CLOCK = {"clock__stragglers": 0.25, "clock__spread": 0.5, "clock__buffer": 1, "clock__statistics": 0.0}
BUFFER = {"clock__mode": "buffer", **CLOCK}
WAIT = {"clock__mode": "wait", **CLOCK}
BUFFERED = {key.replace("__", "."): value for key, value in BUFFER.items()}
FEW = {"stream__participants": 3, "stream__support": 1.0, "train__rounds": 3}
LATE_METHODS = ("fedavg", "fedprox", "fedssi", "pro", "promax", "prolin", "probayes")  # on images; and motion


def same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs have the same bits, apart from simulated times in their events."""

    def timeless(found: dict[str, Any]) -> dict[str, Any]:
        lines = [{k: v for k, v in line.items() if not k.startswith("simulated")} for line in found["events"]]
        return {**found, "events": lines}

    return timeless(one) == timeless(other)


# -- synchronous, with the time counted --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_waiting_is_the_run_without_clocks_to_the_bit(method, tmp_path):
    """Even where replies are lost: they are asked for again."""
    more = {"clock__dropout": 0.3}
    off = outcome(run.start(tiny(method), tmp_path / "off", tmp_path))
    wait = outcome(run.start(tiny(method, **WAIT, **more), tmp_path / "wait", tmp_path))
    assert same_run(off, wait)
    facts = json.loads((tmp_path / "wait" / "run.json").read_text())
    assert facts["simulated_seconds"] > 0
    assert facts["simulated_seconds"] == pytest.approx(facts["tally"]["simulated_seconds"])
    assert events(tmp_path / "wait")[-1]["simulated_time"] == facts["simulated_seconds"]
    assert "simulated_seconds" not in json.loads((tmp_path / "off" / "run.json").read_text())


@pytest.mark.parametrize("base_rounds", [0, 2])
def test_waiting_is_prolin_without_clocks_to_the_bit(base_rounds, fresh, same_bits):
    off, wait = (fresh("prolin", base_rounds=base_rounds, **more).stream() for more in ({}, WAIT))
    assert same_bits(off.server, wait.server)
    assert off.ledger.entries == wait.ledger.entries
    assert (off.state.scores.correct == wait.state.scores.correct).all()


def test_without_clocks_settings_and_state_are_as_before(fresh):
    config = fresh("fedavg").world.config
    assert "clock" not in values_of(config) and "clock" not in to_toml(config)
    assert fresh("fedavg").stream().state.arrivals is None
    assert "late_statistics" not in fresh("promax").stream().server.blocks


def test_settings_of_clocks_are_stored_and_resolve_to_the_same(fresh):
    config = fresh("fedavg", **BUFFER).world.config
    assert resolve(dict(values_of(config))) == config


# -- re-basing ---------------------------------------------------------------------------------------------------------


def state_with(**blocks: float) -> ServerState:
    return ServerState().put(**{name: model(value) for name, value in blocks.items()})


def model(value: float) -> Block:
    return Block("model", {"w": torch.full((3,), value)})


class Net:
    """Blocks whose buffers are named."""

    def __init__(self, *buffers: str) -> None:
        self.buffers = buffers
        self.base = self.adapter = self

    def named_buffers(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.buffers]


def test_the_change_of_a_stale_turn_is_added_to_the_present_model_with_its_weight():
    start = {"base": model(1.0)}
    reply = Reply(0, 5, {"base": model(1.4)})
    found = rebased(reply, start, state_with(base=10.0), ("base",), 0.5, Net())
    assert torch.allclose(found.blocks["base"].tensors["w"], torch.full((3,), 10.2))
    assert (found.client, found.samples) == (0, 5)


def test_a_block_that_is_frozen_now_stays():
    reply = Reply(0, 5, {"base": model(1.4), "adapter": model(2.0)})
    start = {"base": model(1.0), "adapter": model(1.0)}
    found = rebased(reply, start, state_with(base=10.0, adapter=3.0), ("adapter",), 1.0, Net())
    assert found.blocks.keys() == {"adapter"}
    assert torch.equal(found.blocks["adapter"].tensors["w"], torch.full((3,), 4.0))


def test_running_statistics_are_blended_and_stay_in_their_range():
    """A variance that fell from 4 to 1 while the server's fell to 0.5 would become negative as an update."""
    reply = Reply(0, 5, {"base": model(1.0)})
    found = rebased(reply, {"base": model(4.0)}, state_with(base=0.5), ("base",), 0.5, Net("w"))
    assert torch.allclose(found.blocks["base"].tensors["w"], torch.full((3,), 0.75))


def test_other_blocks_are_left_to_the_method():
    statistics = Block("statistics", {"mean": torch.ones(2)}, (4,))
    found = rebased(Reply(0, 5, {"s": statistics}), {}, state_with(base=1.0), ("base",), 0.5, Net())
    assert found.blocks["s"] is statistics


def test_the_weight_falls_with_age():
    assert staleness_weight(0, 0.5) == 1.0
    assert staleness_weight(3, 0.5) == 0.5
    assert staleness_weight(3, 0.0) == 1.0


def test_replies_without_a_block_that_others_have_do_not_change_it():
    """Otherwise their share would be missing from the mean, and the block would shrink."""
    replies = [Reply(0, 5, {"base": model(2.0)}), Reply(1, 5), Reply(2, 0)]
    found = completed(replies, state_with(base=4.0))
    assert [sorted(r.blocks) for r in found] == [["base"], ["base"], []]
    assert torch.equal(found[1].blocks["base"].tensors["w"], torch.full((3,), 4.0))
    assert completed([Reply(1, 5)], state_with(base=4.0))[0].blocks == {}  # a block that no reply has stays, to the bit


# -- an asynchronous run -----------------------------------------------------------------------------------------------


def buffered(fresh: Any, method: str = "fedavg", **settings: Any) -> Any:
    return fresh(method, **{**FEW, **BUFFER, **settings})


def test_a_run_has_the_updates_of_its_schedule(fresh):
    """The run follows the schedule that the plan shows."""
    made = buffered(fresh, "promax", clock__dropout=0.1)
    told: list[dict[str, Any]] = []
    made.stream(lambda what, when, facts: told.append(facts) if what == "round" else None)
    clock = make_clock(made.world)
    schedule = Schedule(clock, 3, planned_work(made.method, 3))
    found = list(schedule.updates())
    assert [facts["simulated_time"] for facts in told] == [update.after.time for update in found]
    assert [facts["started_turns"] for facts in told] == [len(update.started) for update in found]
    assert made.state.arrivals.clock == found[-1].after
    summary = schedule.summary()
    assert summary.lost == sum(facts["lost_replies"] for facts in told) > 0
    assert summary.late_statistics == sum(facts["late_statistics"] for facts in told) > 0
    assert 0 < summary.mean_staleness == made.state.tally["staleness"] / made.state.tally["used_replies"]


@pytest.mark.parametrize("method", ["promax", "prolin"])
def test_the_schedule_depends_on_no_tensor(method, fresh):
    """Another learning rate gives other weights and the same times."""
    ones = [buffered(fresh, method, train__lr=lr).stream() for lr in (0.01, 0.02)]
    assert ones[0].state.arrivals.clock == ones[1].state.arrivals.clock
    one, other = (made.server.blocks["base"].tensors for made in ones)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_turn_is_computed_from_the_model_that_its_client_was_sent(fresh, monkeypatch):
    """And its reply is re-based from there, whenever it arrives."""
    made = buffered(fresh)
    sent: dict[tuple[int, int], Mapping[str, Block]] = {}
    used: list[tuple[int, int]] = []
    original_ask = BufferedRound.ask_turns
    original_rebased = BufferedRound.rebased

    def ask(self: BufferedRound, turns: Sequence[Pending]) -> Asked:
        sent.update({(p.client, p.update): self.server.blocks for p in turns})
        return original_ask(self, turns)

    def rebase(self: BufferedRound, parcel: Any, age: int) -> Reply:
        found = original_rebased(self, parcel, age)
        before = sent[parcel.reply.client, self.updates - age]
        assert all(parcel.start[name].version == before[name].version for name in parcel.start)
        weight = staleness_weight(age, 0.5)
        for name, tensor in found.blocks["head"].tensors.items():
            change = parcel.reply.blocks["head"].tensors[name] - before["head"].tensors[name]
            expected = self.server.blocks["head"].tensors[name] + weight * change
            assert torch.allclose(tensor, expected, atol=1e-6)
        used.append((age, parcel.reply.client))
        return found

    monkeypatch.setattr(BufferedRound, "ask_turns", ask)
    monkeypatch.setattr(BufferedRound, "rebased", rebase)
    made.stream()
    assert {age for age, _ in used} >= {0, 1}


def test_staleness_and_age_limit_change_what_is_learned(fresh, same_bits):
    plain = buffered(fresh).stream()
    assert not same_bits(plain.server, buffered(fresh, clock__staleness=2.0).stream().server)
    limited = buffered(fresh, clock__max_staleness=1, clock__stragglers=0.5).stream()
    assert limited.state.tally["expired_replies"] > 0
    assert limited.state.tally["staleness"] <= limited.state.tally["used_replies"]


def test_bytes_are_counted_when_they_are_sent_and_when_they_arrive(fresh):
    made = buffered(fresh, clock__dropout=0.2)
    told: list[dict[str, Any]] = []
    made.stream(lambda what, when, facts: told.append({**facts, "when": when}) if what == "round" else None)
    schedule = Schedule(make_clock(made.world), 3, planned_work(made.method, 3))
    sent = {(e.position, e.round, e.client, e.direction) for e in made.ledger.entries if e.stage == "round"}
    expected = set()
    for facts, update in zip(told, schedule.updates(), strict=True):
        place = (facts["when"].position, facts["when"].round)
        expected |= {(*place, p.client, "down") for p in update.started}
        expected |= {(*place, p.client, "up") for p in update.arrived if not p.lost}
    assert {entry for entry in sent if entry[3] == "up"} == {entry for entry in expected if entry[3] == "up"}
    assert {entry for entry in sent if entry[3] == "down"} <= expected


def test_with_full_accounting_the_whole_model_is_counted_both_ways(fresh):
    made = buffered(fresh, "promax", transfer="full").stream()
    sizes = {e.bytes for e in made.ledger.entries if e.stage == "round" and e.kind == "model"}
    assert len(sizes) == 1


@pytest.mark.parametrize("accelerate", ["auto", "off"])
def test_order_of_execution_and_workers_change_no_bit(accelerate, tmp_path, monkeypatch):
    same = {**FEW, **BUFFER, "accelerate": accelerate}
    forward = outcome(run.start(tiny("promax", **same), tmp_path / "forward", tmp_path))
    assert outcome(run.start(tiny("promax", workers=3, **same), tmp_path / "three", tmp_path)) == forward
    original = Executor.__call__
    turned = lambda self, turns, guard: original(self, dict(reversed(list(turns.items()))), guard)  # noqa: E731
    monkeypatch.setattr(Executor, "__call__", turned)
    assert outcome(run.start(tiny("promax", **same), tmp_path / "backward", tmp_path)) == forward


def test_a_run_that_stops_with_replies_on_their_way_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """After every round: whatever is on its way then is saved."""
    monkeypatch.setattr(recorder, "SAVE_SECONDS", -1)
    config = tiny("promax", **FEW, **BUFFER)
    whole = outcome(run.start(config, tmp_path / "whole", tmp_path))
    for number in (3, 6):
        folder = tmp_path / f"stopped {number}"

        def stop(progress: Any, number: int = number) -> None:
            if progress.what == "round" and progress.done == number:
                raise KeyboardInterrupt

        with pytest.raises(run.Interrupted):
            run.start(config, folder, tmp_path, observe=stop)
        assert outcome(run.resume(folder)) == whole


def test_replies_on_their_way_survive_saving(fresh):
    made = buffered(fresh, "promax", train__rounds=2)
    found: list[Arrivals] = []
    made.stream(lambda what, when, facts: found.append(made.state.arrivals))
    arrivals = max(found, key=lambda a: len(a.parcels))
    assert {what for _, what, _ in arrivals.parcels} == {"turn", "statistics"}
    tensors, record = pack_arrivals(arrivals)
    again = unpack_arrivals(tensors, json.loads(json.dumps(record)), torch.device("cpu"))
    assert again.clock == arrivals.clock and again.measured == arrivals.measured
    assert pack_arrivals(again)[1] == record
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in pack_arrivals(again)[0].items())


def test_older_models_are_saved_once_and_counted_as_server_memory():
    start = {"base": replace(model(1.0), version=3)}
    parcels = {(c, TURN, 0): turn_of(c, start) for c in (0, 1)}
    arrivals = Arrivals(ClockState(), parcels)
    assert arrivals.start_bytes == 12
    tensors, _ = pack_arrivals(arrivals)
    assert [name for name in tensors if name.startswith("start/")] == ["start/base/3/w"]


def turn_of(client: int, start: Mapping[str, Block]) -> Any:
    from profcil.engine.arrivals import Parcel

    return Parcel(Reply(client, 5, {"base": model(2.0)}), {"model": 12}, When("round", 0, 0, 2), 3, start)


def test_an_update_without_replies_changes_nothing(fresh, monkeypatch):
    """All turns of all rounds are lost: the run ends, with the model that it began with."""
    from profcil.protocol.clocks import Clock

    monkeypatch.setattr(Clock, "is_lost", lambda self, *address: True)
    made = buffered(fresh, "promax")
    start = made.server.blocks["base"]
    made.stream()
    assert made.server.blocks["base"] is start
    assert made.server.blocks["memory"].labels == ()
    assert made.ledger.total(direction="up", stage="round") == 0 < made.ledger.total(direction="down", stage="round")
    assert made.state.tally["lost_replies"] > 0 == made.state.tally["used_replies"]


def test_a_client_that_diverged_has_no_reply(fresh):
    made = buffered(fresh, train__loss_limit=0.0, train__on_divergence="skip-client")
    start = made.server.blocks["base"]
    assert made.stream().server.blocks["base"] is start


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LATE_METHODS, "motion"])
def test_every_method_for_it_goes_on_from_a_saved_state_to_the_same_bits(name, tmp_path, same_bits):
    """On the contract's stream, whose positions may have one client with data, or none."""
    case = MethodCase(name, "graph" if name == "motion" else "image", settings=BUFFERED)
    run = case.begin().finish(tmp_path / "run")
    resumed = case.begin()
    resumed.state = run.saved
    resumed.finish()
    assert same_bits(run.state.server, resumed.state.server)
    assert run.state.ledger.entries == resumed.state.ledger.entries
    assert run.state.arrivals.clock == resumed.state.arrivals.clock


def test_every_other_method_is_refused_in_one_sentence():
    from profcil import registry

    others = [name for name in registry.names("methods") if name not in (*LATE_METHODS, "motion")]
    assert len(others) >= 8
    modality = {"fedseit": "text", "power": "graph"}
    for name in others:
        with pytest.raises(ConfigError, match=r"clock\.mode = wait"):
            MethodCase(name, modality.get(name, "image")).begin(**BUFFERED)


@pytest.mark.parametrize(
    ("method", "settings", "word"),
    [
        ("fedavg", {"robust__aggregation": "median"}, "robust"),
        ("fedavg", {"privacy__secure_sum": "true", "privacy__sum_clients": 2}, "secure_sum"),
        ("fedavg", {"privacy__unit": "client", "privacy__epsilon": 8.0}, "privacy.unit"),
        ("fedavg", {"early_stop": 2}, "early_stop"),
        ("pro", {"refresh": "local"}, "refresh"),
        ("pro", {"adapted_bank": "true"}, "adapted"),
        ("promax", {"transport": "global"}, "transport"),
    ],
)
def test_what_cannot_be_combined_is_refused(method, settings, word, fresh):
    with pytest.raises(ConfigError, match=word):
        fresh(method, **BUFFER, **settings)


def test_the_command_line_says_it_with_status_2(capsys, tmp_path):
    sets = ["--set", "clock.mode=buffer"]
    assert main(["run", "--method", "hr", *sets, "--out", str(tmp_path / "r")]) == 2
    assert main(["plan", "--method", "hr", *sets]) == 2
    assert main(["plan", "--set", "clock.buffer=2"]) == 2
    assert main(["plan", *sets, "--set", "clock.dropout=1"]) == 2
    assert "dropout" in capsys.readouterr().err


def test_the_plan_shows_the_schedule(capsys):
    assert main(["plan", "--set", "clock.mode=buffer", "--set", "clock.stragglers=0.3", "--limit", "0"]) == 0
    assert "of a synchronous run" in capsys.readouterr().out
    assert main(["plan", "--set", "clock.mode=buffer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"]["turns"] > 0
    assert main(["plan", "--json"]) == 0
    assert "schedule" not in json.loads(capsys.readouterr().out)


def test_compare_shows_simulated_seconds_where_there_are_clocks(tmp_path, capsys):
    run.start(tiny(**FEW, **BUFFER), tmp_path / "clock", tmp_path)
    run.start(tiny(**FEW), tmp_path / "plain", tmp_path)
    assert main(["compare", str(tmp_path / "plain")]) == 0
    assert "simulated s" not in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "plain"), str(tmp_path / "clock")]) == 0
    assert "simulated s" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "clock")]) == 0


def test_statistics_are_those_of_the_position_for_which_they_were_asked(fresh, monkeypatch):
    """Even if the client's turn arrived when the position was over, and it works on another task now."""
    made = buffered(fresh, "promax", clock__slowdown=15.0, train__rounds=2, stream__participants=4)
    plan = made.world.plan
    original = type(made.method).add_statistics
    passed: list[int] = []

    def add(self: Any, state: Any, found: Any, measured: Any, when: When) -> Any:
        for late in found:
            position = late.when.position
            assert late.reply.blocks["memory_moments"].labels == plan.observed(late.reply.client, position)
            assert late.reply.samples == len(plan.samples(late.reply.client, position))
            passed.append(when.position - position)
        return original(self, state, found, measured, when)

    monkeypatch.setattr(type(made.method), "add_statistics", add)
    overdue: list[int] = []
    original_measure = TimedDeliveries.measure

    def measure(self: TimedDeliveries, surveys: Sequence[Pending]) -> None:
        before = dict(self.buffered.world.features)
        late = [p for p in surveys if p.position < self.buffered.when.position]
        original_measure(self, late)
        assert self.buffered.world.features.keys() == before.keys()
        overdue.extend(self.buffered.when.position - p.position for p in late)
        original_measure(self, [p for p in surveys if p not in late])

    monkeypatch.setattr(TimedDeliveries, "measure", measure)
    made.stream()
    assert overdue and min(overdue) > 0
    assert max(passed) > 0


def test_overdue_statistics_are_measured_under_the_base_of_the_memory(fresh):
    """PRO-LIN's memory is under the starting base until the position ends, PRO-MAX's under the present one."""
    state = state_with(base=1.0).also(starting_base="base").put(base=model(2.0))
    assert fresh("prolin").method.memory_base(state) == "starting_base"
    assert fresh("prolin").method.memory_base(state.drop("starting_base")) == "base"
    assert fresh("promax", transport="linear").method.memory_base(state) == "starting_base"
    assert fresh("promax", keep_scores=1.0).method.memory_base(state) == "base"
    assert fresh("pro").method.memory_base(state) == "base"


# -- moves of the memory -----------------------------------------------------------------------------------------------


def test_moves_are_recorded_for_whom_they_concern_and_forgotten_afterwards():
    state = state_with(base=1.0)
    assert record_move(state, {"shift": torch.ones(1)}) is state  # late statistics are not expected
    state = expect_late(state)
    assert expect_late(state) is state
    first = state.blocks["base"].version
    for value in (2.0, 3.0):
        state = record_move(state.put(base=model(value)), {"shift": torch.tensor([value])})
    second, third = recorded_moves(state)
    assert [float(m.tensors["shift"]) for m in moves_since(state, first)] == [2.0, 3.0]
    assert [float(m.tensors["shift"]) for m in moves_since(state, second)] == [3.0]
    assert moves_since(state, third) == []
    assert list(recorded_moves(forget_moves(state, second))) == [third]
    assert recorded_moves(forget_moves(state, None)) == {}


def test_a_run_keeps_no_move_that_nobody_needs(fresh):
    assert recorded_moves(buffered(fresh, "promax").stream().server) == {}


def test_the_channel_counts_a_reply_only_when_it_is_told_to():
    channel = Channel(Ledger())
    reply = Reply(0, 5, {"base": model(2.0)})
    _, sizes = channel.packed({}, reply, When("round", 0, 0, 2))
    assert channel.ledger.entries == []
    channel.up({}, reply, When("round", 0, 0, 2))
    assert {e.kind: e.bytes for e in channel.ledger.entries} == sizes


def test_a_state_without_arrivals_is_the_default():
    assert RunState.__dataclass_fields__["arrivals"].default is None


def test_no_data_leaves_its_place(tmp_path: Path):
    """A finished run's folder is complete: its model predicts without the replies that were on their way."""
    folder = run.start(tiny("promax", **FEW, **BUFFER), tmp_path / "run", tmp_path)
    assert main(["eval", str(folder)]) == 0
