"""Encoded blocks and changed rows over the network: the bits and bytes of the simulation; nothing else is accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_grid import tiny
from test_faults import changed_by, events
from test_same_run import outcome
from test_wire import WHEN, round_trip

from profcil.deploy import wire
from profcil.deploy.client.respond import load_inbox
from profcil.deploy.client.store import SiteStore
from profcil.deploy.encoded_blocks import WrongEncoding, read_blocks
from profcil.deploy.wire import Request, block_digest
from profcil.engine import run
from profcil.engine.channel import Block, Reply
from profcil.engine.reply_checks import Knowledge, ReplyRequirements, fault
from profcil.errors import Failure

D = 8
CODING = {"memory": "int8", "transport": "int8", "statistics": "float16", "model": "bfloat16"}
ENCODED = {f"channel__{kind}": encoding for kind, encoding in CODING.items()}


def memory(values: dict[int, float]) -> Block:
    mean = torch.tensor([[v] * D for v in values.values()])
    return Block("memory", {"mean": mean, "count": torch.ones(len(values), dtype=torch.int32)}, tuple(values))


def request(blocks: dict[str, Block], whole: dict[str, Block], patches: tuple[str, ...] = ()) -> Request:
    digests = {name: block_digest(block) for name, block in whole.items()}
    return wire.read_request(round_trip(wire.request_records(Request(0, WHEN, digests, blocks, 0, 1, (), {}, patches))))


@pytest.mark.parametrize("encoding", ["float16", "bfloat16", "int8"])
def test_an_encoded_block_arrives_and_is_decoded_to_the_same_bits(tmp_path, encoding):
    block = memory({1: 0.3, 2: -7.7, 5: 0.001})
    sent = block.encoded({"memory": encoding})
    asked = request({"memory": sent}, {"memory": sent.decoded()})
    assert wire.payload_bytes(asked.blocks) == sent.bytes + sent.header_bytes < block.bytes
    got = load_inbox(SiteStore(tmp_path, "run", 0), asked)["memory"]
    assert torch.equal(got.tensors["mean"], sent.decoded().tensors["mean"])
    assert not torch.equal(got.tensors["mean"], block.tensors["mean"])


def test_changed_rows_complete_the_block_of_the_store(tmp_path):
    store = SiteStore(tmp_path, "run", 0)
    old = memory({1: 1.0, 5: 5.0})
    new = memory({1: 1.0, 2: 2.0, 5: 5.5})
    load_inbox(store, request({"memory": old}, {"memory": old}))
    for _ in range(2):  # a request that is repeated finds the same block
        got = load_inbox(store, request({"memory": new.rows({2, 5})}, {"memory": new}, ("memory",)))["memory"]
        assert block_digest(got) == block_digest(new)
    assert store.stored_digests() == {"memory": block_digest(new)}


def test_changed_rows_of_a_block_that_is_not_there_are_not_used(tmp_path):
    store = SiteStore(tmp_path, "run", 0)
    new = memory({1: 1.0, 2: 2.0})
    for held in (None, memory({1: 9.0})):
        if held:
            store.write_block("memory", held)
        with pytest.raises(Failure, match="does not hold block memory"):
            load_inbox(store, request({"memory": new.rows({2})}, {"memory": new}, ("memory",)))


HOSTILE_ROWS = {
    "fewer rows than labels": {"labels": (2, 5, 7)},
    "more rows than labels": {"labels": (2,)},
    "no rows": {"tensors": {"mean": torch.zeros(0, D), "count": torch.zeros(0, dtype=torch.int32)}},
    "a number in place of rows": {"tensors": {"mean": torch.zeros(2, D), "count": torch.tensor(1, dtype=torch.int32)}},
    "a class twice": {"labels": (5, 5)},
    "other numbers": {"tensors": {"mean": torch.full((2, D), torch.nan), "count": torch.ones(2, dtype=torch.int32)}},
    "another tensor": {"tensors": {"mean": torch.zeros(2, D), "counts": torch.ones(2, dtype=torch.int32)}},
    "wider rows": {"tensors": {"mean": torch.zeros(2, D + 1), "count": torch.ones(2, dtype=torch.int32)}},
    "another kind": {"kind": "statistics"},
}


@pytest.mark.parametrize("what", HOSTILE_ROWS)
def test_rows_that_do_not_complete_a_block_are_not_used(tmp_path, what):
    store = SiteStore(tmp_path, "run", 0)
    old = memory({1: 1.0, 5: 5.0})
    new = memory({1: 1.0, 2: 2.0, 5: 5.5})
    load_inbox(store, request({"memory": old}, {"memory": old}))
    patch = replace(new.rows({2, 5}), **HOSTILE_ROWS[what])
    with pytest.raises(Failure, match="does not hold block memory"):
        load_inbox(store, request({"memory": patch}, {"memory": new}, ("memory",)))
    assert store.stored_digests() == {"memory": block_digest(old)}


def test_rows_may_come_in_any_order(tmp_path):
    store = SiteStore(tmp_path, "run", 0)
    old = memory({1: 1.0, 5: 5.0})
    new = memory({1: 1.0, 2: 2.0, 5: 5.5})
    load_inbox(store, request({"memory": old}, {"memory": old}))
    patch = memory({5: 5.5, 2: 2.0})
    got = load_inbox(store, request({"memory": patch}, {"memory": new}, ("memory",)))["memory"]
    assert block_digest(got) == block_digest(new)


@pytest.mark.parametrize(
    "more",
    [
        ENCODED,
        {"channel__memory": "float16", "channel__rows": "changed", "base_rounds": 0},
        {"channel__nearest": 2, "channel__memory": "int8"},
    ],
    ids=["encoded", "rows", "nearest"],
)
def test_a_deployment_has_the_same_bits_and_bytes_as_the_simulation(deployed, tmp_path, more):
    config = tiny("promax", **more)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deployed(config)
    assert outcome(serial) == outcome(folder)
    asked = [e for e in events(folder, "asked") if e["stage"] != "warmup"]
    sent = sum(sum(e["payload"].values()) for e in asked)
    assert sent == json.loads((folder / "run.json").read_text())["bytes"]
    assert not any(e["refused"] for e in asked)


def moments() -> Block:
    mean = torch.rand(2, D, generator=torch.Generator().manual_seed(1))
    tensors = {"mean": mean, "second": mean**2 + 1, "count": torch.ones(2, dtype=torch.int32)}
    return Block("statistics", tensors, (3, 4))


def with_tensors(block: Block, **tensors: Any) -> Block:
    return Block(block.kind, {**block.tensors, **tensors}, block.labels)


def test_a_reply_is_accepted_in_the_encoding_of_the_settings_alone():
    block = moments()
    got = read_blocks({"moments": block.encoded(CODING)}, CODING)["moments"]
    assert block_digest(got) == block_digest(block.encoded(CODING).decoded())
    assert read_blocks({"moments": block}, {}) == {"moments": block}
    unlike = [
        block,
        block.encoded({"statistics": "bfloat16"}),
        block.encoded({"statistics": "int8"}),
        with_tensors(block.encoded(CODING), mean=block.tensors["mean"]),
        with_tensors(block.encoded(CODING), **{"mean:scale": torch.ones(2)}),
        with_tensors(block.encoded(CODING), **{"mean:float16": block.tensors["mean"]}),
    ]
    for other in unlike:
        with pytest.raises(WrongEncoding, match="moments"):
            read_blocks({"moments": other}, CODING)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, 3e38, -1.0, 1e30])
def test_a_false_scale_is_refused_with_a_reason(scale):
    """Of int8, whose numbers are the product with a scale per class."""
    coding = {"transport": "int8"}
    own = Block("transport", {"shift": torch.ones(2, D), "confidence": torch.ones(2)}, (1, 2))
    sent = own.encoded(coding)
    false = replace(sent, tensors={**sent.tensors, "shift:scale": torch.full((2,), scale)})
    known = Knowledge(frozenset({1, 2}), 10, confidence=1.0)
    terms = ReplyRequirements(Reply(0, 5, {"moves": own}), frozenset({"moves"}), frozenset({"transport"}), known)
    assert fault(Reply(0, 5, read_blocks({"moves": sent}, coding)), terms) == ""
    reason = fault(Reply(0, 5, read_blocks({"moves": false}, coding)), terms)
    assert ("not finite" in reason or "absurdly large" in reason) == (scale != -1.0)  # -1 is a possible shift


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F80, -0x0080, 0x7F81], ids=["NaN", "inf", "-inf", "signalling NaN"])
def test_numbers_of_bfloat16_that_are_not_finite_are_refused(pattern):
    coding = {"statistics": "bfloat16"}
    sent = moments().encoded(coding)
    whole = sent.tensors["mean:bfloat16"].clone()
    whole[0, 0] = pattern
    false = replace(sent, tensors={**sent.tensors, "mean:bfloat16": whole})
    known = Knowledge(frozenset({3, 4}), 10)
    terms = ReplyRequirements(Reply(0, 5, {"m": moments()}), frozenset({"m"}), frozenset({"statistics"}), known)
    assert "not finite" in fault(Reply(0, 5, read_blocks({"m": false}, coding)), terms)


def test_a_value_that_the_memory_cannot_hold_in_float16_does_not_end_the_run(deployed):
    """The mean stays within the bound on the whole tensor, but the memory is broadcast in float16."""

    def lie(response):
        for block in response.reply.blocks.values():
            if block.kind == "statistics" and block.labels:
                block.tensors["mean"][0, 0] = 7e4
                block.tensors["second"][0] = 1e12

    def fault(grid, request, reply):
        is_survey = request.metadata.message_type == "query.survey"
        return changed_by(lie)(grid, request, reply) if is_survey and request.metadata.dst_node_id == 101 else [reply]

    config = tiny("promax", channel__memory="float16", warmup__rounds=0, stream__participants=3)
    folder, _ = deployed(config, fault=fault, norm_limit=1e12)
    refused = {reason for e in events(folder, "asked") for reason in e["refused"].values()}
    assert any("which float16 cannot hold" in reason for reason in refused)
    assert json.loads((folder / "run.json").read_text())["done"]
