"""Blocks, asks and answers survive the journey to the bit; what is not one of ours is told apart from it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.deploy import wire
from profcil.deploy.client import in_hand
from profcil.deploy.store import Keep
from profcil.deploy.wire import Answer, Ask, Unreadable
from profcil.engine.channel import When
from profcil.engine.payload import KINDS, Block, Reply

WHEN = When("round", 1, 2, 5)
KINDS_OF = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)


@st.composite
def blocks(draw) -> Block:
    """Any tensors: empty ones, single numbers, NaN and infinity among them."""
    rng, tensors = torch.Generator().manual_seed(draw(st.integers(0, 99))), {}
    for name in draw(st.lists(st.sampled_from(["a", "b.c", "ü/d"]), unique=True)):
        shape, dtype = draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(KINDS_OF))
        values = torch.randn(shape, generator=rng) * 5
        tensors[name] = (values / (0 * values) if draw(st.booleans()) and dtype.is_floating_point else values).to(dtype)
    labels = tuple(draw(st.lists(st.integers(0, 200), max_size=3)))
    return Block(draw(st.sampled_from(KINDS)), tensors, labels, draw(st.integers(0, 9)))


def same(a: Block, b: Block) -> bool:
    def bits(block: Block) -> dict:
        return {k: (t.dtype, t.shape, t.numpy().tobytes()) for k, t in block.tensors.items()}

    return (a.kind, a.labels, a.version, bits(a)) == (b.kind, b.labels, b.version, bits(b))


def journey(content: RecordDict) -> RecordDict:
    """Through Flower's own serialisation."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    message = Message(content, 7, "train.turn")
    parts = {id: o.deflate() for id, o in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, parts).content


@given(st.dictionaries(st.sampled_from(["base", "keep/3", "head"]), blocks(), max_size=3))
@settings(max_examples=25, deadline=None)
def test_an_ask_arrives_as_it_was_sent(some):
    names = {n: wire.seal(b) for n, b in some.items()} | {"held": "abc"}
    ask = Ask(3, WHEN, names, some, ticket=4, next=5, seen=(9, 2), facts={"run": "x"})
    got = wire.read_ask(journey(wire.ask_records(ask)))
    assert [*got.names.items()] == [*names.items()]  # in order, too
    assert (got.client, got.when, got.ticket, got.next, got.seen, got.facts) == (3, WHEN, 4, 5, (9, 2), {"run": "x"})
    assert all(same(got.blocks[n], b) and wire.seal(got.blocks[n]) == names[n] for n, b in some.items())


@given(st.dictionaries(st.sampled_from(["base", "head"]), blocks(), max_size=2))
@settings(max_examples=25, deadline=None)
def test_an_answer_arrives_as_it_was_sent(some):
    answer = Answer(Reply(2, 17, some, notes={"loss": 0.25}), WHEN, kept=True, trouble="", kind="")
    got = wire.read_answer(journey(wire.answer_records(answer)))
    assert (got.reply.client, got.reply.samples, got.reply.notes, got.kept) == (2, 17, {"loss": 0.25}, True)
    assert got.when == WHEN
    assert got.reply.blocks.keys() == some.keys()
    assert all(same(got.reply.blocks[n], b) for n, b in some.items())


@given(blocks())
@settings(max_examples=25, deadline=None)
def test_a_client_keeps_what_it_was_sent_and_knows_it_by_its_digest(tmp_path_factory, block):
    keep = Keep(tmp_path_factory.mktemp("keep"), "run", 0)
    keep.put("base", block)
    found = keep.get("base", wire.seal(block))
    assert found is not None
    assert same(found, block)
    assert keep.holds() == {"base": wire.seal(block)}
    assert keep.get("base", "another") is None
    assert keep.get("head", "another") is None


def test_a_block_held_under_another_name_is_found_though_that_name_is_sent_anew(tmp_path):
    keep = Keep(tmp_path, "run", 0)
    first, second = (Block("model", {"w": torch.full((2,), x)}, version=int(x)) for x in (1.0, 2.0))
    keep.put("base", first)
    names = {"base": wire.seal(second), "start": wire.seal(first)}
    for sent in ({"base": second}, {}):  # and again later, when nothing is sent
        inbox = in_hand(keep, Ask(0, WHEN, names, sent, 0, 1, (), {}))
        assert same(inbox["base"], second) and same(inbox["start"], first)
    assert keep.holds() == names


def test_private_memories_have_names_and_only_the_last_two_stay(tmp_path):
    keep = Keep(tmp_path, "run", 0)
    for ticket in (1, 2, 3):
        keep.put_private(ticket, {"rows": torch.tensor([ticket])}, last=ticket - 1)
    assert keep.private(1) is None
    assert [keep.private(t)["rows"].item() for t in (2, 3)] == [2, 3]
    assert Keep(tmp_path, "another run", 0).private(3) is None


def head(**values) -> ConfigRecord:
    good = {"client": 1, "samples": 1, "notes": {}, "when": vars(WHEN), "kept": False, "trouble": "", "kind": ""}
    return ConfigRecord({"json": json.dumps({**good, "blocks": {}, **values})})


def pickled() -> Array:
    """What an attacker would love us to open."""
    from io import BytesIO

    file = BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", file.getvalue())


ONE = {"base": ["model", [], 0]}
BAD = {
    "nothing at all": {},
    "no JSON": {"head": ConfigRecord({"json": "{"})},
    "a list": {"head": ConfigRecord({"json": "[1]"})},
    "bytes": {"head": ConfigRecord({"json": b"\xff"})},
    "a block without arrays": {"head": head(blocks=ONE)},
    "arrays without a block": {"head": head(), "block:base": ArrayRecord({})},
    "a pickle": {"head": head(blocks=ONE), "block:base": ArrayRecord({"a": pickled()})},
    "no numpy": {"head": head(blocks=ONE), "block:base": ArrayRecord({"a": Array("f", (1,), "other", b"1")})},
    "cut off": {
        "head": head(blocks=ONE),
        "block:base": ArrayRecord({"a": Array("f", (1,), "numpy.ndarray", b"\x93NUM")}),
    },
    "an unknown kind": {"head": head(blocks={"base": ["raw", [], 0]}), "block:base": ArrayRecord({})},
    "labels that are words": {"head": head(blocks={"base": ["model", ["x"], 0]}), "block:base": ArrayRecord({})},
    "a type torch does not know": {
        "head": head(blocks=ONE),
        "block:base": ArrayRecord({"a": Array(np.array(["text"]))}),
    },
    "no place in the stream": {"head": head(when={"stage": "round"})},
    "samples that are no number": {"head": head(samples="many")},
    "samples beyond all numbers": {"head": head(samples=float("inf"))},
    "notes that are no numbers": {"head": head(notes={"loss": "low"})},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer_of_ours_is_unreadable(name):
    with pytest.raises(Unreadable, match="message"):
        wire.read_answer(RecordDict(BAD[name]))


def test_what_flower_adds_is_counted(tmp_path):
    block = Block("model", {"w": torch.zeros(1000), "b": torch.ones(10)}, (1, 2))
    message = Message(wire.answer_records(Answer(Reply(0, 1, {"base": block}), WHEN)), 7, "train.turn")
    assert wire.payload_bytes({"base": block}) == 4040 + 8
    assert 4048 < wire.wire_bytes([message]) < 4048 + 3000


def test_a_large_model_travels_in_chunks():
    block = Block("model", {"w": torch.arange(3_000_000, dtype=torch.float32)})  # 12 MB
    content = wire.answer_records(Answer(Reply(0, 1, {"base": block}), WHEN))
    chunks = content.array_records["block:base"]["w"].slice_array()
    assert len(chunks) >= 3
    assert same(wire.read_answer(journey(content)).reply.blocks["base"], block)


def test_an_ask_cannot_name_a_folder_of_its_choice():
    content = wire.ask_records(Ask("../..", WHEN, {}, {}, 0, 1, (), {"run": "../x"}))
    with pytest.raises(Unreadable):
        wire.read_ask(content)
