"""Encoded blocks and rows of blocks: whatever tensors a message has, they are read, or refused in one sentence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
from hostile import fuzz
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

from profcil.deploy.client.store import SiteStore
from profcil.deploy.encoded_blocks import WrongEncoding, read_blocks, received_block
from profcil.deploy.wire import Request, block_digest
from profcil.engine.channel import Block, Reply, When
from profcil.engine.reply_checks import Knowledge, ReplyRequirements, fault
from profcil.errors import Failure

D = 8
NAMES = [
    f"{name}{end}"
    for name in ("mean", "second", "count", "")
    for end in ("", ":float16", ":bfloat16", ":int8", ":scale", ":int8:int8", ":float32", ":")
]
TYPES = [torch.float32, torch.float16, torch.int8, torch.int16, torch.int32, torch.bool, torch.float64]
SPECIAL = [0.0, -1.0, 1e-45, 65504.0, 3e38, -3e38, math.inf, -math.inf, math.nan, 127.0, -128.0]
WHEN = When("round", 0, 0, 2)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from([(), (0,), (1,), (2,), (3,), (2, D), (3, D), (0, D), (2, 0), (2, D, 1), (1, 2 * D)]))
    kind = draw(st.sampled_from(TYPES))
    values = torch.tensor(draw(st.lists(st.sampled_from(SPECIAL), min_size=4, max_size=4)), dtype=torch.float64)
    table = values.repeat(math.prod(shape) // 4 + 1)[: math.prod(shape)].view(shape)
    whole = table.nan_to_num(0.0, 127.0, -128.0).clamp(-128, 127)
    return (table if kind.is_floating_point else whole).to(kind)


LABELS = st.lists(st.sampled_from([0, 1, 2, 7, -1, 10**30]), max_size=3).map(tuple)
BLOCKS = st.builds(
    Block,
    st.sampled_from(["statistics", "memory", "model"]),
    st.dictionaries(st.sampled_from(NAMES), tensors(), max_size=4),
    LABELS,
)


def honest() -> Block:
    mean = torch.linspace(0, 1, 2 * D).view(2, D)
    tensors = {"mean": mean, "second": mean.square() + 1, "count": torch.ones(2, dtype=torch.int32)}
    return Block("statistics", tensors, (1, 2))


@pytest.mark.parametrize("encoding", ["float16", "bfloat16", "int8"])
@fuzz
@given(block=BLOCKS, extra=st.dictionaries(st.sampled_from(NAMES), tensors(), max_size=2), labels=LABELS)
def test_replies(encoding, block, extra, labels):
    """A reply of any tensors, and an honest one of which some are replaced."""
    coding = {"statistics": encoding, "memory": encoding}
    expected = Reply(0, 5, {"b": honest()})
    terms = ReplyRequirements(expected, frozenset({"b"}), frozenset({"statistics"}), Knowledge(frozenset({1, 2}), 5))
    own = honest().encoded(coding)
    for sent in (block, Block("statistics", {**own.tensors, **extra}, labels or (1, 2))):
        with attempt() as one:
            try:
                found = read_blocks({"b": sent}, coding)["b"]
            except WrongEncoding as error:
                assert len(str(error).splitlines()) == 1
                one.refused = True
                continue
            one.refused = bool(fault(Reply(0, 5, {"b": found}), terms))
            finite = all(bool(t.isfinite().all()) for t in found.tensors.values())
            known = set(found.labels) <= {1, 2} and len(set(found.labels)) == len(found.labels)
            assert one.refused or (finite and known)


@fuzz
@given(patch=BLOCKS, held=st.booleans())
def test_rows_of_a_server(tmp_path_factory, patch, held):
    """A site completes a block with rows of the server, or says that it cannot."""
    store = SiteStore(Path(tmp_path_factory.mktemp("site")), "run", 0)
    known = Block("memory", honest().tensors, (1, 2))
    if held:
        store.write_block("b", known)
    request = Request(0, WHEN, {"b": block_digest(known)}, {"b": patch}, 0, 1, (), {}, ("b",))
    with attempt() as one:
        try:
            found = received_block(store, request, "b")
        except Failure as error:
            assert len(str(error).splitlines()) == 1
            found = None
        assert found is None or block_digest(found) == block_digest(known)
        one.refused = found is None
