"""The memory of PRO as blocks: what clients send, what the server stores, and how it is refreshed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from profcil.engine.channel import Block
from profcil.memory.bank import Bank, Moments, pool, restore, select, update
from profcil.memory.uncertainty import fresh_dispersion


def bank_of(block: Block) -> Bank:
    """The bank in a block."""
    tensors = block.tensors
    return Bank(block.labels, tensors["mean"], tensors["spread"], tensors["count"], tensors.get("dispersion"))


def block_of(bank: Bank) -> Block:
    """The block of a bank."""
    tensors = {"mean": bank.mean, "spread": bank.spread, "count": bank.count}
    if bank.dispersion is not None:
        tensors["dispersion"] = bank.dispersion
    return Block("memory", tensors, bank.labels)


def moments_of(block: Block) -> Moments:
    """The moments in a block."""
    tensors = block.tensors
    return Moments(block.labels, tensors["mean"], tensors["second"], tensors["count"])


def block_of_moments(m: Moments, bound: float = math.inf) -> Block:
    """The block of moments of features that are no longer than the bound."""
    tensors = {"mean": m.mean, "second": m.second, "count": m.count}
    row_bound = 0.0 if math.isinf(bound) else bound
    return Block("statistics", tensors, m.labels, row_bound=row_bound)


def refreshed_bank(now: Block, before: Block, found: Sequence[Block], merge: str) -> Block:
    """The bank with the moments that clients sent, Eq. (global-memory-refresh). The measured classes are first restored
    to their values in `before`."""
    parts = [moments_of(block) for block in found]
    if "dispersion" in now.tensors:
        parts = [replace(part, dispersion=fresh_dispersion(part.count)) for part in parts]
    fresh = pool(parts)
    bank = restore(bank_of(now), bank_of(before), fresh.labels)
    return block_of(update(bank, fresh, merge))


def extended_bank(now: Block, found: Mapping[int, Sequence[Moments]], measured: Mapping[int, int], merge: str) -> Block:
    """The bank with moments of some positions, which may have been passed: those of the position of which the bank has
    a class already are pooled with it, newer ones are merged or replace it, and older ones are merged or left out."""
    bank = bank_of(now)
    latest = dict(measured)
    for position in sorted(found):
        fresh = pool(found[position])
        same = {y for y in fresh.labels if latest.get(y, -1) == position}
        newer = {y for y in fresh.labels if latest.get(y, -1) < position}
        older = set(fresh.labels) - same - newer
        pooled = same | (older if merge == "counts" else set())
        for classes, how in ((pooled, "counts"), (newer, merge)):
            if classes:
                bank = update(bank, select(fresh, classes), how)
        latest |= dict.fromkeys(newer, position)
    return block_of(bank)
