"""An option of PRO beyond the paper: one within-class covariance matrix of base features that all classes share.

At every refresh clients also send the scatter of their features around their class means, and the server pools it
exactly (`memory/covariance.py`). It stores the mean matrix of all positions, weighted by their examples: how a moved
base changes the covariance of old classes is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox
from profcil.engine.client import Client
from profcil.memory import bank, covariance, symmetric
from profcil.memory.covariance import Covariance
from profcil.methods.parts.memory_blocks import moments_of


def covariance_of(block: Block) -> Covariance:
    """The covariance in a block."""
    matrix = symmetric.unpack(block.tensors["matrix"])
    return Covariance(matrix, int(block.tensors["count"]))


def block_of_covariance(c: Covariance) -> Block:
    """The block of a covariance: a packed triangle, and the number of its examples."""
    count = torch.tensor([c.count], dtype=torch.int32, device=c.matrix.device)
    triangle = symmetric.pack(c.matrix)
    return Block("memory", {"matrix": triangle, "count": count})


def empty_block(like: Tensor) -> Block:
    """The covariance of no examples, for features of the length and device of `like`."""
    zeros = like.new_zeros(len(like), len(like), dtype=torch.float64)
    return block_of_covariance(Covariance(zeros, 0))


def with_scatter(moments: Block, features: Tensor, rank: Tensor) -> Block:
    """A client's moments, and the scatter of its features around their class means. `rank` is the row of each feature's
    class."""
    scatter = covariance.packed_scatter(features, rank, moments.tensors["mean"])
    return replace(moments, tensors={**moments.tensors, "scatter": scatter})


def refreshed(before: Block, found: Sequence[Block]) -> Block:
    """The covariance blended with that of the current examples, weighted by counts."""
    parts = [moments_of(block) for block in found]
    scatters = [block.tensors["scatter"] for block in found]
    fresh = covariance.pool(parts, scatters, bank.pool(parts))
    blended = covariance.blend(covariance_of(before), fresh)
    return block_of_covariance(blended)


def factor_of(block: Block) -> Tensor:
    """The factor L by which noise is correlated."""
    return covariance.factor(covariance_of(block).matrix)


def factor_for(client: Client, inbox: Inbox) -> Tensor | None:
    """The factor for a client's pseudo-features; None before anything is remembered. It is computed once for each
    version of the matrix."""
    if not inbox["memory"].labels:
        return None
    block = inbox["covariance"]
    made = client.once(("factor", block.version), lambda: factor_of(block))
    return client.keep(made)
