"""A linear head that was solved in closed form, as a block: what a deployed model holds in place of the memory."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.memory.linear import clipped, normalised

NAME = "solved_head"
AT_THE_MEAN = 0.97  # the probability of a class at its own mean: chosen on validation data (docs/models.md)


def solved_head(
    labels: tuple[int, ...], weight: Tensor, bias: Tensor, bound: float = math.inf, normalises: bool = False
) -> Block:
    """A row of weights and a bias for each of the labels, for features that were clipped to a bound or normalised."""
    tensors = {"weight": weight, "bias": bias}
    if not math.isinf(bound):
        tensors["length" if normalises else "bound"] = bias.new_tensor([bound])
    return Block("memory", tensors, labels)


def scores_of(head: Block, features: Tensor, classes: int) -> Tensor:
    """Scores of all class ids in float64. A class without a row has the lowest number."""
    size = (features.shape[0], classes)
    lowest = torch.finfo(torch.float64).min
    scores = features.new_full(size, lowest, dtype=torch.float64)
    if head.labels:
        if "bound" in head.tensors:
            features = clipped(features, float(head.tensors["bound"]))
        if "length" in head.tensors:
            features = normalised(features, float(head.tensors["length"]))
        solved = F.linear(features.double(), head.tensors["weight"], head.tensors["bias"])
        scores[:, list(head.labels)] = solved
    return scores


def deploy_head(state: ServerState, head: Block, mean: Tensor, *features: str) -> ServerState:
    """A state with the solved head, its temperature, and the blocks that compute its features."""
    divisor = temperature(head.tensors["weight"], mean)
    stored = head.tensors["bias"].new_tensor([divisor])
    solved = Block("memory", {**head.tensors, "temperature": stored}, head.labels)
    return state.only(*features).put(**{NAME: solved})


def stored_temperature(state: ServerState) -> float:
    """The temperature of a deployed state."""
    return float(state.blocks[NAME].tensors["temperature"])


def temperature(weight: Tensor, mean: Tensor) -> float:
    """The number by which discriminant scores are divided to be log-probabilities; at least 1.

    If features were normal with the pooled covariance, it would be 1. Real features have heavier tails, which first
    and second moments do not show, and probabilities at 1 are too certain. So this is a rule: at a class's own mean,
    the class has the probability AT_THE_MEAN if all others are as far away as the nearest one. The median class
    decides. docs/models.md says how far the probabilities are off.
    """
    if len(mean) < 2:
        return 1.0
    rivals = len(mean) - 1
    log_odds = math.log(AT_THE_MEAN / (1 - AT_THE_MEAN) * rivals)
    products = weight @ mean.double().T
    own = products.diagonal()
    squared = own[:, None] + own[None] - products - products.T
    nearest = squared.fill_diagonal_(torch.inf).amin(1)
    return max(1.0, float(nearest.median()) / 2 / log_odds)
