"""Inertia of the base: between positions it moves the less, the more examples have moved it before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from profcil.engine.channel import Block, Reply, ServerState


def count_examples(state: ServerState, replies: Sequence[Reply]) -> ServerState:
    """The state with the number of examples that trained the base in this round."""
    samples = sum(r.samples for r in replies)
    return state.put(position_samples=number_block(samples))


def interpolate_base(state: ServerState, start: Block, inertia: float) -> ServerState:
    """The base between its values at the start and at the end of a position.

    `inertia` is the weight of an example of earlier positions relative to one of this position. With inertia 1 the base
    is the mean of the bases of all positions, each weighted by the examples of its last round of training.
    """
    new = samples_in(state, "position_samples")
    before = samples_in(state, "past_samples")
    total = number_block(before + new)
    state = state.drop("position_samples").put(past_samples=total)
    if not before or not new:
        return state
    share = new / (new + inertia * before)
    end = state.blocks["base"].tensors
    between = {name: start.tensors[name].lerp(tensor, share) for name, tensor in end.items()}
    return state.put(base=Block("model", between))


def number_block(samples: int) -> Block:
    """A number of examples as a block."""
    return Block("memory", {"samples": torch.tensor([samples])})


def samples_in(state: ServerState, name: str) -> int:
    """A stored number of examples; 0 if there is none."""
    block = state.get(name)
    return int(block.tensors["samples"]) if block else 0
