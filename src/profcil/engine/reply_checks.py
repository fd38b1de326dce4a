"""Validation at the door: whether a reply that came from outside may be taken, or why not.

What a reply must look like is given by an example, `expected`: the blocks, their tensors, types and shapes, and the
sizes of values that are to be expected. What stands in it for a class must be about a class the client may know of.
Pure functions; what happens to a refused reply is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from profcil.engine.payload import Block, Reply


@dataclass(frozen=True)
class Terms:
    """What is asked of one client's reply."""

    expected: Reply  # a reply of the right form, with everything that may be in it
    required: frozenset[str]  # the blocks that must be in it
    kinds: frozenset[str]  # that the method declares
    classes: frozenset[int]  # that this client may speak about
    most: int  # examples it can have behind its reply
    confidence: float = math.inf  # largest value of a confidence
    limit: float = 1000.0  # largest size of a tensor, in multiples of the expected one


def fault(reply: Reply, terms: Terms) -> str:
    """The first thing that is wrong with a reply; empty where nothing is."""
    return next(faults(reply, terms), "")


def faults(reply: Reply, terms: Terms) -> Iterator[str]:
    least = min(1, terms.expected.samples)  # some methods report without any
    if not least <= reply.samples <= terms.most:
        yield f"it claims {reply.samples} examples where {least} to {terms.most} are possible"
    if not all(math.isfinite(v) for v in reply.notes.values()):
        yield "its notes are not all finite numbers"
    yield from strangers(reply.blocks, terms)
    for name, block in reply.blocks.items():
        like = terms.expected.blocks[name]
        for reason in chain(form(block, like), values(block, like, reply.samples, terms)):
            yield f"block {name}: {reason}"


def strangers(blocks: Mapping[str, Block], terms: Terms) -> Iterator[str]:
    """Blocks too many or too few, or of another kind."""
    for name, block in blocks.items():
        if name not in terms.expected.blocks:
            yield f"block {name} was not asked for"
        elif block.kind not in terms.kinds or block.kind != terms.expected.blocks[name].kind:
            yield f"block {name} is of kind '{block.kind}'"
    for name in sorted(terms.required - blocks.keys()):
        yield f"block {name} is missing"


def form(block: Block, like: Block) -> Iterator[str]:
    """Tensors, types and shapes."""
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
    """A tensor with a row for each label has as many rows as its own block has labels. In a block without labels that
    is no model, the number of rows is the client's own, as that of its entries or centroids."""
    if tensor.shape == wanted.shape:
        return True
    if block.kind == "model" or not tensor.dim() or not wanted.dim() or tensor.shape[1:] != wanted.shape[1:]:
        return False
    return len(wanted) == len(like.labels) and len(tensor) == len(block.labels) if like.labels else not block.labels


def values(block: Block, like: Block, samples: int, terms: Terms) -> Iterator[str]:
    if unknown := sorted(set(block.labels) - terms.classes):
        yield f"it speaks about class {unknown[0]}, which the client never declared"
    for name, tensor in block.tensors.items():
        if not tensor.is_floating_point() or name not in like.tensors:
            if tensor.numel() and tensor.dtype != torch.bool and bool((tensor < 0).any()):
                yield f"tensor {name} has negative counts"
        elif not bool(torch.isfinite(tensor).all()):
            yield f"tensor {name} has values that are not finite"
        else:
            more = max(1.0, samples / max(1, terms.expected.samples))
            yield from sizes(name, tensor, like.tensors[name], more, terms)


def sizes(name: str, tensor: Tensor, like: Tensor, more: float, terms: Terms) -> Iterator[str]:
    """Counts are not negative and no more than there can be; a confidence has a range; nothing is absurdly large.
    Sums over examples grow with their number, so what is expected is scaled by how many `more` stand behind it."""
    if name == "count" and tensor.numel() and not 0 <= float(tensor.min()) <= float(tensor.max()) <= terms.most:
        yield f"tensor {name} has counts outside 0 to {terms.most}"
    most = terms.confidence * (1 + 1e-5)
    if name == "confidence" and tensor.numel() and not 0 <= float(tensor.min()) <= float(tensor.max()) <= most:
        yield f"tensor {name} is outside 0 to {terms.confidence:g}"
    if name != "count" and size(tensor) > terms.limit * more * (size(like) + 1):
        yield f"tensor {name} is absurdly large (root mean square {size(tensor):.3g}, expected near {size(like):.3g})"


def size(tensor: Tensor) -> float:
    """The root mean square: a norm that does not depend on the number of rows."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
