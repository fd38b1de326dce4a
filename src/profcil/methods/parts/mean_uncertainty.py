"""The option `uncertainty`: the server stores how sure each class mean is, and uses it (`memory/uncertainty.py`).

Beside the class rows there is one small block, the sums behind the two ratios that all classes share. Nothing more is
sent by a client. The server reads the class means of single replies: the spread between clients is no sum over clients,
so that with secure sums it is not measured, and counts and age remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.memory import bank, uncertainty
from profcil.memory.bank import Bank
from profcil.memory.linear import Summary
from profcil.memory.uncertainty import ShrunkHead
from profcil.methods.parts import solved_head
from profcil.methods.parts.memory_blocks import bank_of, moments_of

NAME = "uncertainty"
BEFORE = "memory_before_refresh"  # PRO's memory before the first refresh of a position, while another one follows
CHOICES = ("off", "shrink")
HELP = (
    "beyond the paper: whether the uncertainty of class means widens pseudo-features and shrinks closed heads, for "
    "classes with few examples"
)
REFUSED = "uncertainty = shrink reads exact counts, and noise changes them; set uncertainty = off"
LATE = "uncertainty = shrink reads all reports of a position at once, so none may arrive late"

MeanRows = tuple[Tensor, Tensor, Tensor]  # mean, count and dispersion of some classes


def empty_block(like: Tensor) -> Block:
    """The sums before anything was measured."""
    return Block("memory", {"sums": uncertainty.no_sums(like)})


def sums_of(state: ServerState) -> Tensor:
    """The sums behind ρ and ω."""
    return state.blocks[NAME].tensors["sums"]


def variance_of(block: Block, sums: Tensor) -> Tensor:
    """v of the classes of a memory."""
    return uncertainty.mean_variance(block.tensors["count"], block.tensors["dispersion"], sums)


def with_clients(state: ServerState, reports: Sequence[Block], variance: Tensor) -> ServerState:
    """The state with the class means of some replies counted for ρ. `variance` is their pooled within-class variance;
    further columns of the means are left out."""
    labels = sorted({label for block in reports for label in block.labels})
    row_of = {label: row for row, label in enumerate(labels)}
    rows = [torch.tensor([row_of[y] for y in block.labels], device=variance.device) for block in reports]
    counts = [block.tensors["count"] for block in reports]
    means = [block.tensors["mean"][:, : len(variance)] for block in reports]
    found = uncertainty.client_sums(counts, means, rows, variance)
    return added(state, torch.cat([found, torch.zeros_like(found)]))


def with_returns(
    state: ServerState,
    stored: tuple[tuple[int, ...], MeanRows],
    fresh: tuple[tuple[int, ...], MeanRows],
    variance: Tensor,
) -> ServerState:
    """The state with the classes counted for ω that are stored and were measured again."""
    common = sorted({*stored[0]} & {*fresh[0]})
    chosen = []
    for labels, rows in (stored, fresh):
        index = torch.tensor([labels.index(y) for y in common], dtype=torch.long, device=variance.device)
        mean, count, dispersion = (tensor[index] for tensor in rows)
        chosen.append((mean, count, dispersion))
    found = uncertainty.return_sums(chosen[0], chosen[1], sums_of(state), variance)
    return added(state, torch.cat([torch.zeros_like(found), found]))


def measured(state: ServerState, found: Sequence[Block], last: bool) -> ServerState:
    """PRO's state before a refresh from these moments: with a memory that is a position older, at the first refresh of
    a position, and at its last one with the means counted for ρ and ω."""
    before = state.get(BEFORE)
    if not found:
        return state
    if before is None:
        before = older_block(state.blocks["memory"])
        state = state.put(memory=before)
    if not last:
        return state
    parts = [moments_of(block) for block in found]
    parts = [replace(part, dispersion=uncertainty.fresh_dispersion(part.count)) for part in parts]
    fresh = bank.bank_from_moments(bank.pool(parts))
    weight = fresh.count.double()[:, None]
    variance = (weight * fresh.spread.double().square()).sum(0) / weight.sum()
    state = with_clients(state, found, variance)
    return with_returns(state, rows_of(bank_of(before)), rows_of(fresh), variance)


def rows_of(stored: Bank | Summary) -> tuple[tuple[int, ...], MeanRows]:
    """The class rows of a memory with dispersion."""
    assert stored.dispersion is not None
    return stored.labels, (stored.mean, stored.count, stored.dispersion)


def older_block(block: Block) -> Block:
    """The memory after the base has moved once more."""
    return replace(block, tensors={**block.tensors, "dispersion": uncertainty.older(block.tensors["dispersion"])})


def predictive(memory: Bank, sums: Tensor, noise: float, shared: bool) -> Bank:
    """The memory with the deviation of pseudo-features around an uncertain mean as its spread: √(γ² + v) times the
    spread of the class, which is shrunk towards that of all classes. Where classes share a covariance, the factor
    √(γ² + v) alone."""
    assert memory.dispersion is not None
    v = uncertainty.mean_variance(memory.count, memory.dispersion, sums)
    scale = (noise**2 + v).sqrt()[:, None].to(memory.mean.dtype)
    if shared:
        return replace(memory, spread=scale.expand_as(memory.mean))
    return replace(memory, spread=scale * uncertainty.pooled_spread(memory.spread, memory.count))


def added(state: ServerState, more: Tensor) -> ServerState:
    """The state with these sums added."""
    sums = sums_of(state) + more
    return state.put(**{NAME: Block("memory", {"sums": sums})})


def head_block(labels: tuple[int, ...], head: ShrunkHead) -> Block:
    """The block of a shrunk head."""
    return solved_head.solved_head(labels, head.weight, head.bias)
