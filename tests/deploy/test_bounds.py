"""What one message may do: it is bounded before it is decoded, and no claim in it takes memory or ends the run."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from test_faults import VICTIM, all_clients, changed_by, events, fault_at, is_work
from test_wire import ONE, header

from profcil.deploy import bounds, wire
from profcil.deploy.server.fleet import TooFewClients
from profcil.deploy.wire import UnreadableMessage
from profcil.errors import Diverged

MANY = 10**12  # values that a header claims


def npy(shape: object, values: bytes = b"\0" * 16, dtype: str = "<f4", version: tuple[int, int] = (1, 0)) -> Array:
    """An array whose npy header claims a shape and a type."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    data = b"\x93NUMPY" + bytes(version) + len(text).to_bytes(2 if version == (1, 0) else 4, "little") + text + values
    return Array("float32", (4,), "numpy.ndarray", data)


def message_with(array: Array) -> RecordDict:
    return RecordDict({"head": header(blocks=ONE), "block:base": ArrayRecord({"a": array})})


def test_an_array_of_the_claimed_size_is_read():
    for version in ((1, 0), (2, 0)):
        found = wire.read_response(message_with(npy("(2, 2)", version=version))).reply.blocks["base"].tensors["a"]
        assert found.shape == (2, 2)
        found += 1  # the memory is writable


@given(st.sampled_from(["<f4", "<i8", "|b1", "<f2"]), st.lists(st.integers(0, 3), max_size=4), st.booleans())
@settings(max_examples=25, deadline=None)
def test_arrays_are_read_as_numpy_reads_them(dtype, shape, fortran):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = Array(np.asfortranarray(values) if fortran else values)
    assert np.array_equal(bounds.read_array(array), array.numpy())


@pytest.mark.parametrize(
    "array",
    [
        npy(f"({MANY},)"),
        npy(f"({MANY}, 0, {MANY})", b"\0"),
        npy("(2, 3)"),
        npy("(2, 1)"),
        npy("(-4,)"),
        npy("(-2, -2)"),
        npy("(2, 2.0)"),
        npy("(True, 4)"),
        npy("4"),
        npy("(1," * 500 + ")" * 500),
        npy("((4,)"),  # a bracket that is never closed: numpy's parser raises an error of Python's tokenizer
        npy("(4,)", dtype="|O"),
        npy("(1,)", dtype="|V16"),
        npy("(2, 2)", version=(3, 0)),
        npy("(2, 2)" + " " * 70_000, version=(2, 0)),
        Array("f", (1,), "numpy.ndarray", b"\x93NUM"),
        Array("f", (1,), "numpy.ndarray", b""),
    ],
    ids=range(17),
)
def test_a_header_that_does_not_describe_its_bytes_is_refused_without_memory(array):
    tracemalloc.start()
    with pytest.raises(UnreadableMessage):
        wire.read_response(message_with(array))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_a_claim_of_many_values_is_refused_and_the_run_goes_on(deployed):
    def claim(grid, request, reply):
        content = reply.content
        record = content.array_records["block:head"]
        name = next(iter(record))
        record[name] = npy(f"({MANY},)")
        return [Message(content, reply_to=request)]

    folder, _ = deployed(all_clients(), fault=fault_at(2, claim))
    assert "claims the shape" in events(folder, "asked")[1]["refused"]["1"]
    assert json.loads((folder / "run.json").read_text())["done"]


@pytest.fixture
def flower_arrays(monkeypatch):
    """Restores how Flower puts arrays together after a test."""
    from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry

    monkeypatch.setitem(inflatable_class_registry, "Array", inflatable_class_registry["Array"])


def test_a_reply_above_the_limit_is_refused(deployed, flower_arrays):
    with pytest.raises(TooFewClients, match="0 of 3 clients sent a usable reply"):
        deployed(all_clients(), max_message_mb=0.001, attempts=1)


def test_a_chunk_that_is_repeated_many_times_takes_no_memory(flower_arrays):
    """Flower's arrays name their chunks by number, and may name one a million times."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    bounds.bound_arrays(1e6)
    message = Message(message_with(npy("(1000,)", b"\0" * 4000)), 7, "train.turn")
    parts = {id: o.deflate() for id, o in get_all_nested_objects(message).items()}
    [array] = [id for id, data in parts.items() if b"arraychunk_ids" in data]
    head, _, body = parts[array].partition(b"\0")
    many = body.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b"0," * 999_999 + b"0]")
    assert many != body
    parts[array] = head.replace(str(len(body)).encode(), str(len(many)).encode()) + b"\0" + many
    content = inflate_object_from_contents(message.object_id, parts).content
    with pytest.raises(UnreadableMessage, match="repeats a part"):
        wire.read_response(content)


def test_a_message_that_flower_cannot_decode_does_not_end_the_run(deployed):
    def break_next_pull(grid, request, reply):
        pull = grid.pull_messages

        def pull_once(ids):
            grid.pull_messages = pull
            raise KeyError("no such object")

        grid.pull_messages = pull_once
        return [reply]

    folder, _ = deployed(all_clients(), fault=fault_at(2, break_next_pull))
    assert [e["reason"] for e in events(folder, "unreadable")] == ["KeyError: 'no such object'"]
    assert json.loads((folder / "run.json").read_text())["done"]


def claims_divergence(response) -> None:
    object.__setattr__(response, "error", "client 1 diverged")
    object.__setattr__(response, "error_kind", "diverged")


def test_one_claim_of_a_divergence_is_a_refused_reply(deployed):
    """By default a divergence ends a run. A claim of one client alone must not."""
    assert all_clients().train.on_divergence == "fail"
    folder, _ = deployed(all_clients(), fault=fault_at(2, changed_by(claims_divergence)))
    assert [e["refused"] for e in events(folder, "asked")] == [{}, {"1": "client 1 diverged"}, {}, {}]
    assert json.loads((folder / "run.json").read_text())["done"]


def test_claims_of_most_clients_end_the_run(deployed):
    def most(grid, request, reply):
        lies = is_work(request) and request.metadata.dst_node_id != VICTIM
        return changed_by(claims_divergence)(grid, request, reply) if lies else [reply]

    with pytest.raises(Diverged, match="client 1 diverged"):
        deployed(all_clients(), fault=most)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"blocks": ' + "[" * 9 + "]" * 9 + "}",
        '{"a": "]]]]]]]]]]", "blocks": ' + "[" * 9 + "]" * 9 + "}",
        '{"a": "' + "x" * bounds.MAX_HEAD + '"}',
        '"' + r"\"" * 100_000,
        "[1]",
    ],
)
def test_a_header_that_is_too_deep_or_too_long_is_refused(text):
    with pytest.raises(UnreadableMessage):
        wire.unpack(RecordDict({"head": ConfigRecord({"json": text})}))


def test_brackets_within_texts_are_not_depth():
    head, _ = wire.unpack(RecordDict({"head": ConfigRecord({"json": json.dumps({"blocks": {}, "t": '["[' * 50})})}))
    assert head["t"] == '["[' * 50


def test_too_many_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_ARRAYS", 3)
    arrays = ArrayRecord({str(i): npy("(4,)") for i in range(4)})
    with pytest.raises(UnreadableMessage, match="more than 3 arrays"):
        wire.read_response(RecordDict({"head": header(blocks=ONE), "block:base": arrays}))
