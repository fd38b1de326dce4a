"""Banks, moments and the shared covariance as blocks: what PRO and PRO-MAX store and send."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from profcil.engine.payload import Block
from profcil.memory import linear
from profcil.memory.bank import Bank, Moments
from profcil.memory.covariance import Covariance


def bank_of(block: Block) -> Bank:
    """The bank in a block."""
    tensors = block.tensors
    return Bank(block.labels, tensors["mean"], tensors["spread"], tensors["count"])


def block_of(bank: Bank) -> Block:
    """The block of a bank."""
    tensors = {"mean": bank.mean, "spread": bank.spread, "count": bank.count}
    return Block("memory", tensors, bank.labels)


def moments_of(block: Block) -> Moments:
    """The moments in a block."""
    tensors = block.tensors
    return Moments(block.labels, tensors["mean"], tensors["second"], tensors["count"])


def block_of_moments(m: Moments) -> Block:
    """The block of moments."""
    tensors = {"mean": m.mean, "second": m.second, "count": m.count}
    return Block("statistics", tensors, m.labels)


def with_tensor(block: Block, **tensors: Tensor) -> Block:
    """The block with further tensors."""
    return replace(block, tensors={**block.tensors, **tensors})


def covariance_of(block: Block) -> Covariance:
    """The covariance in a block."""
    matrix = linear.unpack(block.tensors["matrix"])
    return Covariance(matrix, int(block.tensors["count"]))


def block_of_covariance(c: Covariance) -> Block:
    """The block of a covariance: a packed triangle, and the number of its examples."""
    count = torch.tensor([c.count], dtype=torch.int32, device=c.matrix.device)
    triangle = linear.pack(c.matrix)
    return Block("memory", {"matrix": triangle, "count": count})
