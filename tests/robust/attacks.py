"""Replies of a lying client: each attack turns an honest reply into a false one.

An attack gets the reply, the blocks that the client was sent, and a random generator. A reply without the blocks that
an attack falsifies stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox, Reply
from profcil.memory import symmetric

LARGEST_INT = 2**31 - 1
Change = Callable[[Tensor, Tensor], Tensor]  # sent tensor, broadcast tensor → false tensor


@dataclass(frozen=True)
class Attack:
    name: str
    falsify: Callable[[Reply, Inbox, torch.Generator], Reply]
    target: str  # what it falsifies: model, rows, transport, matrix or sums


# -- model weights -----------------------------------------------------------------------------------------------------


def weights(change: Callable[[Tensor, Tensor, torch.Generator], Tensor]) -> Callable[..., Reply]:
    """Changes every tensor of the model blocks."""

    def falsify(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
        blocks = dict(reply.blocks)
        for name, block in blocks.items():
            if block.kind == "model" and name in inbox:
                sent = inbox[name].tensors
                blocks[name] = replace(block, tensors={k: change(t, sent[k], rng) for k, t in block.tensors.items()})
        return replace(reply, blocks=blocks)

    return falsify


def random_update(sent: Tensor, broadcast: Tensor, rng: torch.Generator) -> Tensor:
    """Noise ten times as long as the honest update."""
    noise = torch.randn(sent.shape, generator=rng)
    length = (sent - broadcast).norm()
    return broadcast + 10 * length * noise / noise.norm().clamp(min=1e-12)


# -- class statistics --------------------------------------------------------------------------------------------------


def rows(change: Callable[[Block], Block], kind: str = "statistics") -> Callable[..., Reply]:
    """Changes the blocks with a row for each class."""

    def falsify(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
        blocks = {n: change(b) if b.kind == kind and b.labels else b for n, b in reply.blocks.items()}
        return replace(reply, blocks=blocks)

    return falsify


def with_tensors(block: Block, **changes: Callable[[Tensor], Tensor]) -> Block:
    """The block with some of its tensors changed, those that it has."""
    changed = {name: change(block.tensors[name]) for name, change in changes.items() if name in block.tensors}
    return replace(block, tensors={**block.tensors, **changed})


def repeat_label(block: Block) -> Block:
    """The first row 2,000 times."""
    tensors = {name: t[:1].expand(2000, *t.shape[1:]).clone() for name, t in block.tensors.items()}
    return replace(block, labels=block.labels[:1] * 2000, tensors=tensors)


def swap_labels(block: Block) -> Block:
    """Every row under the label of the next one."""
    tensors = {name: t.roll(1, 0) for name, t in block.tensors.items()}
    return replace(block, tensors=tensors)


def claim_all(block: Block) -> Block:
    """Rows for the classes 0 to 9, all copies of the first."""
    tensors = {name: t[:1].expand(10, *t.shape[1:]).clone() for name, t in block.tensors.items()}
    return replace(block, labels=tuple(range(10)), tensors=tensors)


def double_rows(block: Block) -> Block:
    """Every row twice."""
    tensors = {name: torch.cat([t, t]) for name, t in block.tensors.items()}
    return replace(block, labels=block.labels * 2, tensors=tensors)


def matrix(change: Callable[[Tensor], Tensor]) -> Callable[..., Reply]:
    """Changes the factors of second-moment matrices."""

    def falsify(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
        return replace(reply, blocks={n: with_tensors(b, factor=change) for n, b in reply.blocks.items()})

    return falsify


def heavier(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
    """Statistics as of 1,000 times as many examples; matrix and counts agree."""
    blocks = {}
    for name, block in reply.blocks.items():
        blocks[name] = with_tensors(block, count=lambda t: t * 1000, factor=lambda t: t * 1000**0.5)
    return replace(reply, blocks=blocks)


def many_examples(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
    return replace(reply, samples=LARGEST_INT)


def sums(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
    """Sums of the dictionary's search, 1,000 times too large."""
    if "sums" not in reply.blocks:
        return reply
    tensors = {n: t * 1000 for n, t in reply.blocks["sums"].tensors.items()}
    return replace(reply, blocks={**reply.blocks, "sums": replace(reply.blocks["sums"], tensors=tensors)})


def scaled_features(factor: float) -> Callable[..., Reply]:
    """Statistics of features times a factor: means, second moments and matrix agree with each other."""

    def falsify(reply: Reply, inbox: Inbox, rng: torch.Generator) -> Reply:
        widths = {b.tensors["mean"].shape[1] + 1 for b in reply.blocks.values() if b.labels and "mean" in b.tensors}
        blocks = {}
        for name, block in reply.blocks.items():
            blocks[name] = with_tensors(
                block,
                mean=lambda t: t * factor,
                second=lambda t: t * factor**2,
                factor=lambda t: scaled_factor(t, max(widths, default=1), factor),
            )
        return replace(reply, blocks=blocks)

    return falsify


def scaled_factor(packed: Tensor, width: int, factor: float) -> Tensor:
    """A packed factor of [u; 1] with u times a factor."""
    rows = symmetric.unpack_factor(packed, width)
    rows[:, :-1] *= factor
    return symmetric.packed_rows(rows).float()


def shifts(block: Block) -> Block:
    return with_tensors(block, shift=lambda t: torch.full_like(t, 100.0), confidence=lambda t: torch.full_like(t, 5.0))


MODEL_ATTACKS = (
    Attack("update with its sign flipped", weights(lambda t, b, _: 2 * b - t), "model"),
    Attack("weights with their sign flipped", weights(lambda t, b, _: -t), "model"),
    Attack("update x 100", weights(lambda t, b, _: b + 100 * (t - b)), "model"),
    Attack("update x -100", weights(lambda t, b, _: b - 100 * (t - b)), "model"),
    Attack("random update", weights(random_update), "model"),
    Attack("all weights zero", weights(lambda t, b, _: torch.zeros_like(t)), "model"),
    Attack("no update", weights(lambda t, b, _: b.clone()), "model"),
    Attack("2^31 - 1 examples", many_examples, "model"),
)
ROW_ATTACKS = (
    Attack(
        "counts of 2^31 - 1", rows(lambda b: with_tensors(b, count=lambda t: torch.full_like(t, LARGEST_INT))), "rows"
    ),
    Attack("one label 2,000 times", rows(repeat_label), "rows"),
    Attack("every row twice", rows(double_rows), "rows"),
    Attack("rows for every class", rows(claim_all), "rows"),
    Attack("far means", scaled_features(100.0), "rows"),
    Attack("means x 1.4", scaled_features(1.4), "rows"),
    Attack("means with their sign flipped", scaled_features(-1.0), "rows"),
    Attack("swapped labels", rows(swap_labels), "rows"),
    Attack("second moments x 100", rows(lambda b: with_tensors(b, second=lambda t: t * 100)), "rows"),
    Attack("second moments of 0", rows(lambda b: with_tensors(b, second=torch.zeros_like)), "rows"),
    Attack("1,000 times as many examples", heavier, "rows"),
)
TRANSPORT_ATTACKS = (
    Attack("shifts of 100, confidence 5", rows(shifts, "transport"), "transport"),
    Attack(
        "confidence of a million",
        rows(lambda b: with_tensors(b, confidence=lambda t: t * 0 + 1e6), "transport"),
        "transport",
    ),
)
MATRIX_ATTACKS = (
    Attack("factor of 0", matrix(torch.zeros_like), "matrix"),
    Attack("factor x 100", matrix(lambda t: t * 100), "matrix"),
    Attack("dictionary sums x 1,000", sums, "sums"),
)
ATTACKS = (*MODEL_ATTACKS, *ROW_ATTACKS, *TRANSPORT_ATTACKS, *MATRIX_ATTACKS)
