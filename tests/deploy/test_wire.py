"""Blocks, requests and responses arrive with the same bits; any other message is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.deploy import wire
from profcil.deploy.client.respond import load_inbox
from profcil.deploy.client.store import SiteStore
from profcil.deploy.wire import Request, Response, UnreadableMessage
from profcil.engine.channel import KINDS, Block, Reply, When

WHEN = When("round", 1, 2, 5)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)


@st.composite
def blocks(draw) -> Block:
    """Blocks with any tensors: also empty ones, scalars, and NaN and infinity."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {}
    for name in draw(st.lists(st.sampled_from(["a", "b.c", "ü/d"]), unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.randn(shape, generator=rng) * 5
        if draw(st.booleans()) and dtype.is_floating_point:
            values = values / (0 * values)
        tensors[name] = values.to(dtype)
    labels = tuple(draw(st.lists(st.integers(0, 200), max_size=3)))
    return Block(draw(st.sampled_from(KINDS)), tensors, labels, draw(st.integers(0, 9)))


def same(a: Block, b: Block) -> bool:
    def bits(block: Block) -> dict:
        return {k: (t.dtype, t.shape, t.numpy().tobytes()) for k, t in block.tensors.items()}

    return (a.kind, a.labels, a.version, bits(a)) == (b.kind, b.labels, b.version, bits(b))


def round_trip(content: RecordDict) -> RecordDict:
    """The content after Flower's serialisation and deserialisation."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    message = Message(content, 7, "train.turn")
    parts = {id: o.deflate() for id, o in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, parts).content


@given(st.dictionaries(st.sampled_from(["base", "keep/3", "head"]), blocks(), max_size=3))
@settings(max_examples=25, deadline=None)
def test_a_request_arrives_as_it_was_sent(some):
    digests = {n: wire.block_digest(b) for n, b in some.items()} | {"held": "abc"}
    request = Request(3, WHEN, digests, some, private_id=4, next_private_id=5, seen=(9, 2), facts={"run": "x"})
    got = wire.read_request(round_trip(wire.request_records(request)))
    assert [*got.digests.items()] == [*digests.items()]  # in the same order
    assert (got.client, got.when, got.private_id, got.next_private_id) == (3, WHEN, 4, 5)
    assert (got.seen, got.facts) == ((9, 2), {"run": "x"})
    for name, block in some.items():
        assert same(got.blocks[name], block)
        assert wire.block_digest(got.blocks[name]) == digests[name]


@given(st.dictionaries(st.sampled_from(["base", "head"]), blocks(), max_size=2))
@settings(max_examples=25, deadline=None)
def test_a_response_arrives_as_it_was_sent(some):
    response = Response(Reply(2, 17, some, notes={"loss": 0.25}), WHEN, has_private=True, error="", error_kind="")
    got = wire.read_response(round_trip(wire.response_records(response)))
    assert (got.reply.client, got.reply.samples, got.reply.notes) == (2, 17, {"loss": 0.25})
    assert got.has_private
    assert got.when == WHEN
    assert got.reply.blocks.keys() == some.keys()
    assert all(same(got.reply.blocks[n], b) for n, b in some.items())


@given(blocks())
@settings(max_examples=25, deadline=None)
def test_a_store_returns_a_block_by_name_and_digest(tmp_path_factory, block):
    store = SiteStore(tmp_path_factory.mktemp("store"), "run", 0)
    store.write_block("base", block)
    digest = wire.block_digest(block)
    found = store.read_block("base", digest)
    assert found is not None
    assert same(found, block)
    assert store.stored_digests() == {"base": digest}
    assert store.read_block("base", "another") is None
    assert store.read_block("head", "another") is None


def test_a_block_stored_under_another_name_is_found_even_if_that_name_is_overwritten(tmp_path):
    store = SiteStore(tmp_path, "run", 0)
    first = Block("model", {"w": torch.full((2,), 1.0)}, version=1)
    second = Block("model", {"w": torch.full((2,), 2.0)}, version=2)
    store.write_block("base", first)
    digests = {"base": wire.block_digest(second), "start": wire.block_digest(first)}
    for sent in ({"base": second}, {}):  # the second request sends no block
        inbox = load_inbox(store, Request(0, WHEN, digests, sent, 0, 1, (), {}))
        assert same(inbox["base"], second)
        assert same(inbox["start"], first)
    assert store.stored_digests() == digests


def test_a_store_keeps_the_last_two_private_tensors(tmp_path):
    store = SiteStore(tmp_path, "run", 0)
    for number in (1, 2, 3):
        store.write_private(number, {"rows": torch.tensor([number])}, previous_id=number - 1)
    assert store.read_private(1) is None
    assert [store.read_private(number)["rows"].item() for number in (2, 3)] == [2, 3]
    assert SiteStore(tmp_path, "another run", 0).read_private(3) is None


def header(**values) -> ConfigRecord:
    """A valid header, with some values replaced."""
    valid = {"client": 1, "samples": 1, "notes": {}, "when": vars(WHEN), "kept": False, "trouble": "", "kind": ""}
    return ConfigRecord({"json": json.dumps({**valid, "blocks": {}, **values})})


def pickled_array() -> Array:
    """An array that could run code if it were unpickled."""
    from io import BytesIO

    file = BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", file.getvalue())


ONE = {"base": ["model", [], 0]}
UNREADABLE = {
    "no records": {},
    "invalid JSON": {"head": ConfigRecord({"json": "{"})},
    "a list": {"head": ConfigRecord({"json": "[1]"})},
    "bytes that are not UTF-8": {"head": ConfigRecord({"json": b"\xff"})},
    "a block without arrays": {"head": header(blocks=ONE)},
    "arrays without a block": {"head": header(), "block:base": ArrayRecord({})},
    "a pickle": {"head": header(blocks=ONE), "block:base": ArrayRecord({"a": pickled_array()})},
    "not a numpy array": {
        "head": header(blocks=ONE),
        "block:base": ArrayRecord({"a": Array("f", (1,), "other", b"1")}),
    },
    "a truncated array": {
        "head": header(blocks=ONE),
        "block:base": ArrayRecord({"a": Array("f", (1,), "numpy.ndarray", b"\x93NUM")}),
    },
    "an unknown kind": {"head": header(blocks={"base": ["raw", [], 0]}), "block:base": ArrayRecord({})},
    "labels that are text": {"head": header(blocks={"base": ["model", ["x"], 0]}), "block:base": ArrayRecord({})},
    "a type unknown to torch": {
        "head": header(blocks=ONE),
        "block:base": ArrayRecord({"a": Array(np.array(["text"]))}),
    },
    "an incomplete moment": {"head": header(when={"stage": "round"})},
    "samples that are text": {"head": header(samples="many")},
    "infinite samples": {"head": header(samples=float("inf"))},
    "notes that are text": {"head": header(notes={"loss": "low"})},
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_message_that_is_not_a_response_is_unreadable(name):
    with pytest.raises(UnreadableMessage, match="message"):
        wire.read_response(RecordDict(UNREADABLE[name]))


def test_the_bytes_that_flower_adds_are_counted(tmp_path):
    block = Block("model", {"w": torch.zeros(1000), "b": torch.ones(10)}, (1, 2))
    message = Message(wire.response_records(Response(Reply(0, 1, {"base": block}), WHEN)), 7, "train.turn")
    assert wire.payload_bytes({"base": block}) == 4040 + 8
    assert 4048 < wire.wire_bytes([message]) < 4048 + 3000


def test_a_large_model_is_sent_in_chunks():
    block = Block("model", {"w": torch.arange(3_000_000, dtype=torch.float32)})  # 12 MB
    content = wire.response_records(Response(Reply(0, 1, {"base": block}), WHEN))
    chunks = content.array_records["block:base"]["w"].slice_array()
    assert len(chunks) >= 3
    assert same(wire.read_response(round_trip(content)).reply.blocks["base"], block)


def test_a_request_cannot_choose_a_folder_at_the_site():
    content = wire.request_records(Request("../..", WHEN, {}, {}, 0, 1, (), {"run": "../x"}))
    with pytest.raises(UnreadableMessage):
        wire.read_request(content)


def test_what_a_site_stores_is_readable_by_its_user_alone(tmp_path):
    (tmp_path / "sites").mkdir(mode=0o755)
    store = SiteStore(tmp_path / "sites", "run", 0)
    assert store.path.stat().st_mode & 0o077 == 0
    store.path.chmod(0o755)  # as an older version left it
    assert SiteStore(tmp_path / "sites", "run", 0).path.stat().st_mode & 0o077 == 0


def test_noise_at_a_site_is_drawn_from_a_secret_of_its_own(tmp_path):
    """The same after a restart, another at every site, and readable by no other user."""
    store = SiteStore(tmp_path, "run", 0)
    secret = store.noise_secret()
    assert SiteStore(tmp_path, "run", 0).noise_secret() == secret
    assert SiteStore(tmp_path, "run", 1).noise_secret() != secret
    assert secret.bit_length() > 200
    assert store.path.stat().st_mode & 0o077 == 0
