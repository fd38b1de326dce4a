"""Messages of a deployment: any header and any bytes are read, or refused as unreadable, at both ends."""

from __future__ import annotations

import json
import string

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hostile import apply, edits, fuzz
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

from profcil.deploy import wire
from profcil.deploy.hello import read_hello
from profcil.deploy.server.bindings import Bindings
from profcil.deploy.sites.declarations import declaration_error
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.wire import UnreadableMessage

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(string.printable, max_size=5), st.just(10**400)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)
WHEN = {"stage": "round", "position": 0, "round": 0, "rounds": 2}
HEADS = {
    "response": {
        "client": 1,
        "samples": 3,
        "notes": {"loss": 0.5},
        "when": WHEN,
        "kept": False,
        "trouble": "",
        "kind": "",
    },
    "request": {
        "client": 1,
        "when": WHEN,
        "names": {"b": "x"},
        "ticket": 0,
        "next": 1,
        "seen": [1],
        "facts": {"run": "x"},
    },
    "hello": {"client": 1, "holds": {}, "site": {"order": {"0": 0}, "counts": {"0": 3}}, "as": "0", "execution": {}},
}
READERS = {"response": wire.read_response, "request": wire.read_request, "hello": read_hello}
BLOCK = Array(np.zeros((2, 2), "f4"))


def read(kind: str, content: RecordDict) -> None:
    with attempt() as one:
        try:
            READERS[kind](content)
        except UnreadableMessage as error:
            assert str(error)
            one.refused = True


@pytest.mark.parametrize("kind", READERS)
@fuzz
@given(data=st.data())
def test_values_of_a_header(kind, data):
    head = HEADS[kind] | {"blocks": {"b": ["model", [], 0]} if kind != "hello" else {}}
    name = data.draw(st.sampled_from([*head, "fault"]))
    changed = head | {name: data.draw(VALUES)}
    records = {"block:b": ArrayRecord({"w": BLOCK})} if kind != "hello" else {}
    content = RecordDict({"head": ConfigRecord({"json": json.dumps(changed)}), **records})
    read(kind, content)


@pytest.mark.parametrize("kind", READERS)
@fuzz
@given(changes=edits(), array=edits())
def test_bytes_of_a_message(kind, changes, array):
    text = apply(json.dumps(HEADS[kind] | {"blocks": {"b": ["model", [], 0]}}).encode(), changes)
    block = Array(BLOCK.dtype, BLOCK.shape, BLOCK.stype, apply(BLOCK.data, array))
    head = ConfigRecord({"json": text.decode("utf-8", "replace")})
    read(kind, RecordDict({"head": head, "block:b": ArrayRecord({"w": block})}))


@fuzz
@given(declaration=st.dictionaries(st.sampled_from(["order", "counts", "x"]), VALUES))
def test_declarations(declaration):
    terms = read_federation('modality = "text"\ntasks = [["a"], ["b"]]\nsites = ["n"]')
    for check in (lambda: declaration_error(declaration, terms), lambda: Bindings().bind(0, "key", declaration)):
        with attempt() as one:
            reason = check()
            assert isinstance(reason, str)
            one.refused = bool(reason)
