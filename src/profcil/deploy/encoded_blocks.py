"""Encoded blocks and rows of blocks in messages: what a receiver makes of them, and when it refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from profcil.config import ChannelSettings
from profcil.deploy.client.store import SiteStore
from profcil.deploy.wire import CONTENT_ERRORS, Request, block_digest
from profcil.engine.changed_rows import has_rows, patched
from profcil.engine.channel import Block, Coding, Reply, When
from profcil.engine.encoding import coded_name, encoding_of
from profcil.errors import Failure

Form = dict[str, tuple[torch.dtype, torch.Size]]  # names, types and shapes of tensors


class WrongEncoding(Exception):
    """A block that is not encoded as the settings of the channel say."""


def coding_at(settings: ChannelSettings, when: When) -> Coding:
    """How blocks are encoded in a stage: before the stream they are not."""
    return {} if when.before_stream else settings.coding


def as_received(block: Block, coding: Coding) -> Block:
    """A block as its receiver computes with it."""
    return block.encoded(coding).decoded() if block.kind in coding else block


def encoded_reply(reply: Reply, coding: Coding) -> Reply:
    """A reply as it is sent."""
    return replace(reply, blocks={name: block.encoded(coding) for name, block in reply.blocks.items()})


def read_blocks(blocks: Mapping[str, Block], coding: Coding) -> dict[str, Block]:
    """The decoded blocks of a message. Blocks that are encoded in another way than by `coding` are refused."""
    return {name: read_block(name, block, coding) for name, block in blocks.items()}


def read_block(name: str, block: Block, coding: Coding) -> Block:
    """One decoded block: encoded again it must have tensors of the same names, types and shapes."""
    if block.kind not in coding:
        return block
    encoding = coding[block.kind]
    try:
        plain = block.decoded()
    except CONTENT_ERRORS as error:
        raise WrongEncoding(f"block {name} cannot be decoded ({error})") from None
    if form(block) != encoded_form(plain.tensors, encoding, len(plain.labels)):
        raise WrongEncoding(f"block {name} is not encoded as {encoding} is")
    return plain


def form(block: Block) -> Form:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in block.tensors.items()}


def encoded_form(tensors: Mapping[str, torch.Tensor], encoding: str, classes: int) -> Form:
    """The form of some tensors as they are sent. It is known without computing them, which would take memory."""
    found: Form = {}
    for name, tensor in tensors.items():
        chosen = encoding_of(tensor, encoding, classes)
        types = {"float32": tensor.dtype, "float16": torch.float16, "bfloat16": torch.int16, "int8": torch.int8}
        found[name if chosen == "float32" else coded_name(name, chosen)] = (types[chosen], tensor.shape)
        if chosen == "int8":
            found[coded_name(name, "scale")] = (torch.float32, tensor.shape[:1])
    return found


def received_block(store: SiteStore, request: Request, name: str) -> Block | None:
    """A block that was sent with a request. Of a patch, the other rows are in the store; None if they are not."""
    block = decoded_by_name(name, request.blocks[name])
    if name not in request.patches:
        return block
    held = store.latest_block(name)
    if held is None or form_of_rows(held) != form_of_rows(block) or not has_rows(block):
        return None
    complete = patched(held, block)
    return complete if block_digest(complete) == request.digests[name] else None


def decoded_by_name(name: str, block: Block) -> Block:
    """A block of the server, whose tensors say how they are encoded."""
    try:
        return block.decoded()
    except CONTENT_ERRORS as error:
        raise Failure(f"block {name} of the server cannot be decoded ({error})") from None


def form_of_rows(block: Block) -> Form:
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in block.tensors.items()}
