"""Encoded blocks, changed rows and nearest classes: what is sent, what the ledger counts, what clients compute with."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs
import torch

from profcil.engine import run as runs
from profcil.engine.changed_rows import patched
from profcil.engine.channel import Block, Channel, ServerState, When
from profcil.engine.nearest_classes import NearestClasses
from profcil.engine.packing import Packing
from profcil.engine.world import make_world
from profcil.errors import ConfigError
from profcil.io.atomic_files import read_tensors
from profcil.methods.parts.shift_blocks import with_all_rows
from profcil.metrics.ledger import Ledger
from profcil.resolve import resolve, to_toml

FLOAT = {"float32": 4, "float16": 2, "bfloat16": 2}
INT8 = {"channel__memory": "int8", "channel__transport": "int8"}


def row_bytes(d: int, encoding: str) -> int:
    """The bytes of d numbers of one class: int8 has a scale of four bytes."""
    return d + 4 if encoding == "int8" else FLOAT[encoding] * d


# -- encodings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8"])
def test_the_ledger_counts_the_encoded_bytes(tiny, encoding):
    """The paper's b |Y| (2d + 1) and b |Y| (d + 1), with the bytes of the encoding for all but the counts."""
    run = tiny("promax", transfer="full", channel__memory=encoding, channel__transport=encoding)
    d = run.world.net.features
    before = run.before()
    turns = [(p, r, c) for p, r in before for c in run.clients(p, r)]
    confidence = FLOAT["float16" if encoding == "int8" else encoding]
    for p, r, c in turns:
        old = len(before[p, r].blocks["memory"].labels)
        found = {
            (e.direction, e.kind): e.bytes
            for e in run.ledger.entries
            if (e.stage, e.position, e.round, e.client) == ("round", p, r, c)
        }
        assert found.get(("down", "memory"), 0) == old * (2 * row_bytes(d, encoding) + 4)
        if r < run.method.params.base_rounds:
            number = 4 if old == 1 else confidence  # a single number stays as it is
            assert found.get(("up", "transport"), 0) == old * (row_bytes(d, encoding) + number)
    assert any(before[p, r].blocks["memory"].labels for p, r, _ in turns)


def test_a_client_computes_with_what_was_sent(tiny):
    run = tiny("promax", **INT8)
    when = run.when(1, 0)
    channel = Channel(Ledger(), packing=Packing(run.world.config.channel.coding))
    stored = run.server.blocks["memory"]
    got = channel.down(0, run.server, ["base", "memory"], when)
    assert got["base"] is run.server.blocks["base"]
    assert torch.equal(got["memory"].tensors["mean"], stored.encoded({"memory": "int8"}).decoded().tensors["mean"])
    assert not torch.equal(got["memory"].tensors["mean"], stored.tensors["mean"])
    assert torch.equal(got["memory"].tensors["count"], stored.tensors["count"])
    assert channel.down(1, run.server, ["memory"], when)["memory"] is got["memory"]  # decoded once


@pytest.mark.parametrize(
    "settings",
    [
        {"channel__memory": "int8"},
        {"channel__transport": "int8"},
        {"channel__statistics": "float16"},
        {"channel__model": "float16"},
    ],
    ids=str,
)
def test_every_encoding_changes_what_the_run_computes(tiny, same_bits, settings):
    assert not same_bits(tiny("promax").server, tiny("promax", **settings).server)


def test_the_server_computes_with_what_was_sent(fresh, monkeypatch):
    run = fresh("promax", **INT8, channel__statistics="bfloat16", channel__model="float16")
    seen: list[Block] = []

    def watched(name: str) -> Any:
        original = getattr(run.method, name)

        def call(state: ServerState, replies: Any, when: When) -> ServerState:
            seen.extend(block for reply in replies for block in reply.blocks.values())
            return original(state, replies, when)

        return call

    for name in ("aggregate", "absorb"):
        monkeypatch.setattr(run.method, name, watched(name))
    run.stream()
    coding = run.world.config.channel.coding
    assert {block.kind for block in seen} == {"model", "statistics", "transport"}
    for block in seen:
        again = block.encoded(coding).decoded().tensors
        assert all(torch.equal(tensor, again[name]) for name, tensor in block.tensors.items())


def test_by_default_blocks_are_sent_as_they_are(tiny):
    run = tiny("promax")
    assert run.world.config.channel.coding == {}
    assert "channel" not in to_toml(run.world.config)
    got = Channel(Ledger()).down(0, run.server, ["base", "memory"], run.when(1, 0))
    assert all(block is run.server.blocks[name] for name, block in got.items())
    assert got.message() == dict(got)


# -- changed rows ------------------------------------------------------------------------------------------------------


def memory_of(values: dict[int, float]) -> Block:
    tensors = {"mean": torch.tensor([[v] * 8 for v in values.values()]), "count": torch.ones(len(values))}
    return Block("memory", tensors, tuple(values))


def at(position: int = 0) -> When:
    return When("round", position, 0, 2)


def tracking() -> Channel:
    return Channel(Ledger(), packing=Packing(histories={}))


def sent_rows(channel: Channel, client: int, state: ServerState) -> tuple[int, ...] | None:
    """The classes whose rows a client is sent; None if the block is not sent."""
    message = channel.down(client, state, ["memory"], at()).message()
    return message["memory"].labels if message else None


def test_a_client_is_sent_the_rows_that_have_changed_since_its_version():
    channel = tracking()
    first = ServerState().put(memory=memory_of({1: 1.0, 4: 4.0}))
    second = first.put(memory=memory_of({1: 1.0, 2: 2.0, 4: 4.5}))
    third = second.put(memory=memory_of({1: 1.5, 2: 2.0, 4: 4.5}))
    assert sent_rows(channel, 0, first) == (1, 4)
    assert sent_rows(channel, 0, second) == (2, 4)
    assert sent_rows(channel, 0, second) is None
    assert sent_rows(channel, 1, second) == (1, 2, 4)
    assert sent_rows(channel, 1, third) == (1,)
    assert sent_rows(channel, 2, first.put(other=memory_of({}))) == (1, 4)


def test_the_patched_block_is_the_new_one():
    old = memory_of({1: 1.0, 4: 4.0, 6: 6.0})
    new = memory_of({1: 1.0, 2: 2.0, 4: 4.5, 6: 6.0})
    made = patched(old, new.rows({2, 4}))
    assert made.labels == new.labels
    assert all(torch.equal(made.tensors[name], new.tensors[name]) for name in new.tensors)


def test_after_a_class_was_removed_the_block_is_sent_whole():
    channel = tracking()
    first = ServerState().put(memory=memory_of({1: 1.0, 4: 4.0}))
    second = first.put(memory=memory_of({1: 1.0}))
    assert sent_rows(channel, 0, first) == (1, 4)
    assert sent_rows(channel, 0, second) == (1,)
    assert channel.packing.histories["memory"].missing(first.blocks["memory"].version) is None


def test_a_failed_round_leaves_no_trace_in_the_rows():
    channel = tracking()
    first = ServerState().put(memory=memory_of({1: 1.0, 4: 4.0}))
    sent_rows(channel, 0, first)
    with pytest.raises(KeyboardInterrupt), channel.round([0]):
        sent_rows(channel, 0, first.put(memory=memory_of({1: 9.0, 4: 4.0})))
        raise KeyboardInterrupt
    assert sent_rows(channel, 0, first.put(memory=memory_of({1: 1.0, 4: 5.0}))) == (4,)


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_changed_rows_give_the_same_bits_for_fewer_bytes(tiny, same_bits, method):
    settings: dict[str, Any] = {"channel__memory": "float16", "base_rounds": 0}
    whole = tiny(method, **settings)
    rows = tiny(method, **settings, channel__rows="changed")
    assert same_bits(whole.server, rows.server)
    assert np.array_equal(whole.state.scores.correct, rows.state.scores.correct)
    assert rows.ledger.total(kind="memory") < 0.8 * whole.ledger.total(kind="memory")
    assert rows.ledger.total(kind="model") == whole.ledger.total(kind="model")


# -- nearest classes ---------------------------------------------------------------------------------------------------


def near(own: dict[int, tuple[int, ...]], count: int = 2) -> Channel:
    """A channel for clients that have these classes at every position."""
    chosen = NearestClasses(count, ("memory",), 0, lambda client, position: own[client])
    return Channel(Ledger(), packing=Packing(nearest=chosen))


def test_a_client_is_sent_its_own_classes_and_the_nearest_others():
    state = ServerState().put(memory=memory_of({1: 1.0, 2: 2.1, 3: 3.0, 7: 7.5, 9: 9.0}))
    channel = near({0: (1,), 1: (3, 9, 5), 2: (4, 6)})
    got = {c: channel.down(c, state, ["memory"], at())["memory"] for c in range(3)}
    assert got[0].labels == (1, 2, 3)
    assert got[1].labels == (2, 3, 7, 9)
    assert torch.equal(got[1].tensors["mean"][:, 0], torch.tensor([2.1, 3.0, 7.5, 9.0]))
    assert len(got[2].labels) == 2  # the memory has none of its classes: some are drawn
    assert channel.ledger.total(kind="memory") == (3 + 4 + 2) * (8 + 1) * 4


def test_rows_are_sent_again_when_the_choice_may_be_another():
    state = ServerState().put(memory=memory_of({1: 1.0, 2: 2.1, 3: 3.0, 7: 7.5, 9: 9.0}))
    channel = near({0: (1,)})
    assert channel.down(0, state, ["memory"], at()).sent == ("memory",)
    assert channel.down(0, state, ["memory"], at()).sent == ()
    assert channel.down(0, state, ["memory"], at(1)).sent == ("memory",)
    assert channel.down(0, state.put(other=memory_of({})), ["memory"], at(1)).sent == ()
    assert channel.down(0, state.put(memory=state.blocks["memory"]), ["memory"], at(1)).sent == ("memory",)


def test_a_small_memory_is_sent_whole():
    state = ServerState().put(memory=memory_of({1: 1.0, 2: 2.1, 3: 3.0}))
    assert near({0: (1,)}).down(0, state, ["memory"], at())["memory"].labels == (1, 2, 3)


def test_a_run_with_the_nearest_classes_is_whole_and_sends_less(tiny):
    plain = tiny("promax", adapted_bank=True)
    chosen = tiny("promax", adapted_bank=True, channel__nearest=2)
    assert chosen.ledger.total(direction="down", kind="memory") < plain.ledger.total(direction="down", kind="memory")
    assert chosen.ledger.total(kind="transport") < plain.ledger.total(kind="transport")
    assert chosen.server.blocks["memory"].labels == plain.server.blocks["memory"].labels


def test_a_class_that_nobody_was_sent_is_not_moved():
    tensors = {"shift": torch.ones(2, 3), "confidence": torch.tensor([0.5, 1.0])}
    made = with_all_rows(Block("transport", tensors, (2, 5)), (1, 2, 5))
    assert made.labels == (1, 2, 5)
    assert made.tensors["confidence"].tolist() == [0.0, 0.5, 1.0]
    assert made.tensors["shift"].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3]


# -- resume, and settings that do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"channel__memory": "int8", "channel__rows": "changed"}, {"channel__nearest": 2, "channel__model": "float16"}],
    ids=["rows", "nearest"],
)
def test_a_resumed_run_has_the_same_bits(tmp_path, settings):
    config = tiny_runs.tiny("promax", **settings)
    whole = runs.start(config, tmp_path / "whole", tmp_path)
    rounds = []

    def press_ctrl_c(progress: Any) -> None:
        rounds.append(progress.what)
        if rounds.count("round") == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(runs.Interrupted):
        runs.start(config, tmp_path / "cut", tmp_path, observe=press_ctrl_c)
    resumed = runs.resume(tmp_path / "cut")
    assert tiny_runs.outcome(resumed) == tiny_runs.outcome(whole)
    assert row_histories(resumed) == row_histories(whole)
    assert bool(row_histories(whole)) == (config.channel.rows == "changed")


def row_histories(folder: Path) -> Any:
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    return found[1].get("row_histories")


@pytest.mark.parametrize(
    ("method", "sets", "message"),
    [
        ("fedavg", {"channel.memory": "int8"}, "fedavg sends no memory"),
        ("prolin", {"channel.statistics": "float16"}, "prolin needs its statistics in float32"),
        ("prolin", {"channel.nearest": 5}, "prolin broadcasts no memory by class"),
        ("fedavg", {"channel.rows": "changed"}, "fedavg broadcasts no memory by class"),
        ("pro", {"channel.rows": "changed", "channel.nearest": 5}, "set one of them"),
        ("pro", {"channel.rows": "changed", "transfer": "full"}, "set one of them"),
        ("pro", {"channel.statistics": "float16", "privacy.secure_sum": True}, "fixed-point numbers"),
        ("pro", {"channel.nearest": 5, "privacy.secure_sum": True}, "fixed-point numbers"),
        ("pro", {"channel.statistics": "int8"}, "choose one of float32"),
        ("pro", {"channel.nearest": -1}, "at least 0"),
    ],
)
def test_settings_without_effect_or_that_do_not_fit_are_refused(tmp_path, method, sets, message):
    with pytest.raises(ConfigError, match=message):
        make_world(resolve(None, {"dataset": "digits", "method": method}, sets), tmp_path)


def test_the_settings_of_the_channel_have_no_short_name():
    config = resolve(None, {"dataset": "digits", "method": "promax"}, {"transport": "global"})
    assert (config.params.transport, config.channel.transport) == ("global", "float32")
    with pytest.raises(ConfigError, match="unknown setting 'nearest'"):
        resolve(None, {"dataset": "digits", "method": "promax"}, {"nearest": 3})
