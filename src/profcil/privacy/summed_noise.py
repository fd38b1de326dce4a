"""Noise on secure sums: each client adds a share of it to its fixed-point numbers before they are masked.

With n clients and a threshold of s, at least s of them are in a sum that is completed. A share has 1/s of the variance
of the noise that is accounted for, so that the sum has at least that noise; if all n are in it, n/s times the variance.
The server sees the sum alone, so both units are protected against it.

A share is drawn from a secret number and the name of what it is added to: a digest of the numbers, of the place in the
stream, of the clients of the sum and of what they were sent. So a sum that is asked for again is the same sum. Any
other has noise of its own from each client, also from those who add the same to both: the difference of two sums has
the noise of two.

What one example or client can change is measured on the fixed-point numbers. Rounding to them adds at most one unit to
each number, which is accounted for; `MARGIN` is for the rounding of float32 in what is summed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox, When
from profcil.errors import ConfigError, Failure
from profcil.io.atomic_files import digest
from profcil.privacy.adaptive_bound import MOST as MOST_SAID
from profcil.privacy.adaptive_bound import NOTE
from profcil.privacy.adaptive_bound import SHARE as SHARE_SAID
from profcil.privacy.discrete_noise import LEAST, MOST, SLACK, Integers, Words, discrete_gaussian, words_of
from profcil.privacy.protection import Protection
from profcil.privacy.secure_sum.fixed_point import Real, Ring
from profcil.privacy.sums import Sum, sums_of
from profcil.randomness import derive_bytes

WITHOUT_NOISE = "samples"  # the number of clients that have a reply
SAID = f"notes/{NOTE}"  # whether a model update is within its bound
MARGIN = 1.001  # enough for means over 8,000 examples, whose float32 rounding counts up
KEY_BYTES = 16
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SumNoise:
    """The noise of a secure sum. Deviations are those of a share, in units of the fixed-point numbers."""

    deviations: Mapping[str, float]  # by array; others have no noise
    weights: Mapping[str, Tensor]  # by array, of its numbers: those with weight w have 1/w of the deviation
    bits: int  # binary places of the fixed-point numbers

    def drawn(self, shapes: Shapes, words: Words) -> Integers:
        """A share for all arrays of a sum, in their order."""
        parts = [np.zeros(0, np.int64)]
        for name, shape in shapes.items():
            count = math.prod(shape)
            if name in self.deviations:
                parts.append(self.drawn_array(name, count, words))
            else:
                parts.append(np.zeros(count, np.int64))
        return np.concatenate(parts)

    def drawn_array(self, name: str, count: int, words: Words) -> Integers:
        """A share for the numbers of one array. Numbers of equal weight are drawn together."""
        weights = np.broadcast_to(self.weights[name].cpu().numpy(), (count,))
        noise = np.zeros(count, np.int64)
        for weight in np.unique(weights):
            alike = np.flatnonzero(weights == weight)
            noise[alike] = discrete_gaussian(self.deviations[name] / float(weight), len(alike), words)
        return noise

    def deviation(self, name: str, clients: int) -> float:
        """The deviation of the noise in the sum of so many clients, on a number of weight 1."""
        return math.ldexp(self.deviations[name] * math.sqrt(clients), -self.bits)


def noise_of_sum(
    protection: Protection, blocks: Mapping[str, Block], shapes: Shapes, shares: int, bits: int, bound: float = 0.0
) -> SumNoise:
    """The noise of a sum of these blocks, whose arrays have these shapes. `bound` is that of model updates."""
    model = tuple(f"{name}/" for name, block in blocks.items() if block.kind == "model")
    found = {name: sums_of(name, block) for name, block in blocks.items() if block.kind != "model"}
    sums = {f"{name}/{part}": total for name, totals in found.items() for part, total in totals.items()}
    check_protected(shapes, sums, model)
    parts = protection.model_parts(bool(model)) + sum(total.share for total in sums.values())
    scale = protection.multiplier * math.sqrt(parts)
    deviations = {}
    for name, total in sums.items():
        most = total.most * protection.most_examples
        deviations[name] = scale * in_units(most, total.weight, [shapes[name]], bits) / math.sqrt(total.share)
    updates = [name for name in shapes if name.startswith(model)] if model else []
    weight = torch.ones((), dtype=torch.float64)
    most = in_units(bound, weight, [shapes[name] for name in updates], bits)
    deviations |= dict.fromkeys(updates, scale * most)
    if SAID in shapes:
        deviations[SAID] = scale * in_units(MOST_SAID, weight, [()], bits) / math.sqrt(SHARE_SAID)
    weights = {name: total.weight for name, total in sums.items()} | dict.fromkeys([*updates, SAID], weight)
    shared = {name: math.sqrt((deviation**2 + SLACK**2) / shares) for name, deviation in deviations.items()}
    check_range(shared, bits)
    return SumNoise(shared, weights, bits)


def name_of_sum(when: When, members: Sequence[int], inbox: Inbox, noise: SumNoise) -> str:
    """Names a sum of these members, who were sent these blocks. Another sum has another name."""
    place = (when.stage, when.position, when.round, *sorted(members))
    sent = [digest_of(name, inbox[name]) for name in sorted(inbox)]
    return short_digest(f"{place} {sorted(noise.deviations.items())} {noise.bits} {sent}".encode())


def digest_of(name: str, block: Block) -> str:
    """A digest of a block that clients were sent."""
    return digest({key: t.detach().cpu() for key, t in block.tensors.items()}, f"{name} {list(block.labels)}")


def name_of_part(name: str, client: int, vector: Ring) -> str:
    """Names what a client adds to a sum of this name. Other numbers have another name."""
    return short_digest(f"{name} {client} ".encode() + vector.tobytes())


def short_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def with_noise(vector: Ring, shapes: Shapes, noise: SumNoise, secret: int, name: str) -> Ring:
    """The numbers of a client with its share of the noise, which follows from its secret and their name."""
    words = words_of(derive_bytes(secret, "noise on a sum", name, size=KEY_BYTES))
    return vector + noise.drawn(shapes, words).view(np.uint64)


def in_units(most: float, weight: Tensor, shapes: Sequence[tuple[int, ...]], bits: int) -> float:
    """The most by which the rounded numbers of arrays can change, all together, in units of the fixed-point numbers:
    each may be rounded to the other side."""
    numbers = sum(math.prod(shape) for shape in shapes)
    rounding = math.sqrt(numbers * float(weight.square().mean()))
    return math.ldexp(most * MARGIN, bits) + rounding


def check_protected(shapes: Shapes, sums: Mapping[str, Sum], model: tuple[str, ...]) -> None:
    """Raises an error if an array would be sent without noise."""
    for name in shapes:
        if name not in sums and name not in (SAID, WITHOUT_NOISE) and not (model and name.startswith(model)):
            raise Failure(f"noise cannot protect {name}, which is no sum over examples; set privacy.unit = none")


def check_range(deviations: Mapping[str, float], bits: int) -> None:
    """Raises an error if a share of the noise has too few or too many units to be drawn exactly."""
    for name, deviation in deviations.items():
        if deviation < 2 * LEAST or deviation > MOST:
            change = "raise" if deviation < 2 * LEAST else "lower"
            raise ConfigError(
                f"a share of the noise on {name} has a deviation of {deviation:.3g} units of 2^-{bits}, which cannot "
                f"be drawn exactly; {change} privacy.sum_bits"
            )


def noised_block(name: str, block: Block, noise: SumNoise, clients: int) -> Block:
    """A summed block with the variance of its noise, as in `sums.block_of_sums`: on each number of a matrix beside its
    diagonal, or on each number of the sum of a class."""
    tensors = dict(block.tensors)
    if f"{name}/gram" in noise.deviations:
        variance = noise.deviation(f"{name}/gram", clients) ** 2 / 2
        tensors["noise"] = tensors["gram"].new_tensor([variance]).float()
    if f"{name}/count" in noise.deviations:
        variance = noise.deviation(f"{name}/mean", clients) ** 2
        tensors["noise"] = torch.full_like(tensors["count"], variance, dtype=torch.float32)
        tensors["count"] = tensors["count"].to(torch.int32)
    return replace(block, tensors=tensors)


def counted(total: Mapping[str, Real], noise: SumNoise) -> dict[str, Real]:
    """The sums with noised counts as whole numbers. A class without any is left out by its method."""
    found = dict(total)
    for name in total:
        if name.endswith("/count") and name in noise.deviations:
            found[name] = np.rint(total[name]).clip(min=0)
    return found
