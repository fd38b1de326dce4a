"""Validates replies and says why a reply is refused.

Two kinds of checks: of its form, against an example reply (`ReplyRequirements`), for replies that arrive over a
network; and of its values, against what the client can know (`Knowledge`), wherever replies are not trusted. The
functions are pure: the caller decides what happens to a refused reply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from profcil.engine.channel import Block, Reply
from profcil.engine.encoding import ROUNDING
from profcil.engine.moment_checks import wrong_matrices, wrong_moments

MAX_NOTES = 32
MAX_NOTE_NAME = 40  # characters
LARGEST_NOTE = 1e15  # sums of it over clients stay finite, and whole numbers up to it are exact
# What the server itself writes about a round. A note of such a name would overwrite it.
LOG_FIELDS = frozenset(
    {
        *("event", "stage", "position", "round", "seconds", "clients", "skipped", "correct", "alignment"),
        *("resident_mb", "server_seconds", "envelope_bytes", "resent_bytes", "refused_replies", "silent_clients"),
        *("late_replies", "client", "node", "reason", "answered", "silent", "refused", "payload", "wire", "pid"),
        *("dropped", "dropped_replies", "quarantined", "opposed", "skipped_sums"),
    }
)
ROWS_BY_CLASS = ("statistics", "transport")  # kinds of blocks in which a class has one row


@dataclass(frozen=True)
class Knowledge:
    """What one client can know and have."""

    classes: frozenset[int]  # that it has declared or was sent
    most: int  # the largest number of examples it can have used
    confidence: float = math.inf  # the largest confidence
    noised: bool = False  # whether it adds noise: counts may then be negative, and moments may not fit each other
    rounding: float = ROUNDING["float32"]  # relative error that its statistics may have
    largest: float = math.inf  # the largest value of a row by class, which the memory's encoding must hold


@dataclass(frozen=True)
class ReplyRequirements:
    """The requirements for one client's reply."""

    expected: Reply  # a valid reply with every block and tensor that is allowed
    required: frozenset[str]  # the blocks that must be there
    kinds: frozenset[str]  # the kinds of blocks that the method declares
    known: Knowledge
    limit: float = 1000.0  # the largest root mean square of a tensor, in multiples of the expected one


def fault(reply: Reply, terms: ReplyRequirements) -> str:
    """The first reason to refuse a reply; empty if it is valid."""
    return next(faults(reply, terms), "")


def faults(reply: Reply, terms: ReplyRequirements) -> Iterator[str]:
    """Reasons to refuse a reply. Later checks assume that the earlier ones found nothing."""
    least = min(1, terms.expected.samples)  # in some methods a reply uses no examples
    if reply.samples < least:
        yield f"it claims {reply.samples} examples where {least} to {terms.known.most} are possible"
    yield from wrong_notes(reply)
    yield from unexpected_blocks(reply.blocks, terms)
    more = max(1.0, reply.samples / max(1, terms.expected.samples))
    for name, block in reply.blocks.items():
        like = terms.expected.blocks[name]
        for reason in wrong_tensors(block, like):
            yield f"block {name}: {reason}"
    yield from impossible(reply, terms.known)
    for name, block in reply.blocks.items():
        for reason in too_large(block, terms.expected.blocks[name], more * terms.limit):
            yield f"block {name}: {reason}"


def impossible(reply: Reply, known: Knowledge) -> Iterator[str]:
    """Values that no client with this knowledge can have computed. Later checks assume that the earlier ones found
    nothing."""
    if not 0 <= reply.samples <= known.most:
        yield f"it claims {reply.samples} examples where 0 to {known.most} are possible"
    for name, block in reply.blocks.items():
        moments = iter(()) if known.noised else wrong_moments(block, known.rounding)
        for reason in chain(wrong_labels(block, known), wrong_values(block, known), moments):
            yield f"block {name}: {reason}"
    if not known.noised:
        yield from wrong_matrices(reply, known.rounding)


def wrong_notes(reply: Reply) -> Iterator[str]:
    """Notes that are too many, that overwrite a field of the log, or that are not finite numbers of a possible size."""
    if len(reply.notes) > MAX_NOTES:
        yield f"it has {len(reply.notes)} notes where {MAX_NOTES} are allowed"
    for name in list(reply.notes)[:MAX_NOTES]:
        if name in LOG_FIELDS:
            yield f"its note {name} is a field of the log"
        elif not name.isidentifier() or not name.isascii() or len(name) > MAX_NOTE_NAME:
            yield "its notes have names that are not short words"
    if not all(math.isfinite(v) and abs(float(v)) <= LARGEST_NOTE for v in reply.notes.values()):
        yield f"its notes are not all finite numbers up to {LARGEST_NOTE:g}"


def unexpected_blocks(blocks: Mapping[str, Block], terms: ReplyRequirements) -> Iterator[str]:
    """Unknown or missing blocks, and blocks of a wrong kind."""
    for name, block in blocks.items():
        if name not in terms.expected.blocks:
            yield f"block {name} was not asked for"
            continue
        expected_kind = terms.expected.blocks[name].kind
        if block.kind not in terms.kinds or block.kind != expected_kind:
            yield f"block {name} is of kind '{block.kind}'"
    for name in sorted(terms.required - blocks.keys()):
        yield f"block {name} is missing"


def wrong_tensors(block: Block, like: Block) -> Iterator[str]:
    """Unknown or missing tensors, and tensors of a wrong type or shape."""
    for name in like.tensors.keys() - block.tensors.keys():
        yield f"tensor {name} is missing"
    for name, tensor in block.tensors.items():
        if name not in like.tensors:
            yield f"tensor {name} was not asked for"
            continue
        wanted = like.tensors[name]
        if tensor.dtype != wanted.dtype:
            yield f"tensor {name} is of type {tensor.dtype}, not {wanted.dtype}"
        elif not fits(tensor, wanted, block, like):
            yield f"tensor {name} has shape {tuple(tensor.shape)} where {tuple(wanted.shape)} was expected"


def fits(tensor: Tensor, wanted: Tensor, block: Block, like: Block) -> bool:
    """Whether a tensor has an allowed shape.

    In a model the shape is fixed. In a block with labels a tensor may have one row for each label of its own block. In
    any other block the client chooses the number of rows, e.g. of entries or centroids.
    """
    if tensor.shape == wanted.shape:
        return True
    if block.kind == "model" or not tensor.dim() or not wanted.dim():
        return False
    if tensor.shape[1:] != wanted.shape[1:]:
        return False
    if not like.labels:
        return not block.labels
    return len(wanted) == len(like.labels) and len(tensor) == len(block.labels)


def wrong_labels(block: Block, known: Knowledge) -> Iterator[str]:
    """Undeclared classes, and classes with several rows where there may be one."""
    if unknown := sorted(set(block.labels) - known.classes):
        yield f"it has rows for class {unknown[0]}, which the client never declared"
    if block.kind in ROWS_BY_CLASS and len(set(block.labels)) < len(block.labels):
        yield "it has several rows for one class"


def wrong_values(block: Block, known: Knowledge) -> Iterator[str]:
    """Values that are NaN or infinite, and counts and confidences outside their range."""
    for name, tensor in block.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"tensor {name} has values that are not finite"
        elif block.labels and tensor.is_floating_point() and not within(tensor.abs(), known.largest):
            yield f"tensor {name} has values above {known.largest:g}, which float16 cannot hold"
        elif known.noised:
            continue
        elif name == "count" and not is_count(tensor, known.most, block):
            yield f"tensor {name} has counts outside 0 to {known.most}, of all classes together"
        elif name == "confidence" and not within(tensor, known.confidence * (1 + 1e-5)):
            yield f"tensor {name} is outside 0 to {known.confidence:g}"
        elif not tensor.is_floating_point() and not within(tensor, math.inf):
            yield f"tensor {name} has negative counts"


def is_count(tensor: Tensor, most: int, block: Block) -> bool:
    """Whether these are whole numbers of at most so many examples. Rows by class count each example once."""
    whole = tensor.double()
    total = float(whole.sum()) if block.kind in ROWS_BY_CLASS else 0.0
    return within(whole, most) and total <= most and bool((whole == whole.round()).all())


def too_large(block: Block, like: Block, limit: float) -> Iterator[str]:
    """Tensors with an implausible root mean square. Sums over examples grow with the number of examples, and so must
    the limit."""
    for name, tensor in block.tensors.items():
        if not tensor.is_floating_point() or name == "count" or name not in like.tensors:
            continue
        expected = size(like.tensors[name])
        if size(tensor) > limit * (expected + 1):
            yield f"tensor {name} is absurdly large (root mean square {size(tensor):.3g}, expected near {expected:.3g})"


def within(tensor: Tensor, most: float) -> bool:
    """Whether all values are between 0 and `most`."""
    if not tensor.numel():
        return True
    return float(tensor.min()) >= 0 and float(tensor.max()) <= most


def size(tensor: Tensor) -> float:
    """The root mean square: a norm that does not depend on the number of rows."""
    if not tensor.numel():
        return 0.0
    return float(tensor.double().square().mean().sqrt())
