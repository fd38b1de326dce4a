"""Filter banks of a TextCNN in two parts (FedWeIT, Yoon et al., 2021): θ = B ⊙ sigmoid(m) + A.

B is shared by all clients. The gate m (one number per filter) and the adaptive A belong to one task of one client. The
parts are blocks in addition to the base, and their tensors have the same names as in the base: `words` (embedding),
`shared` (B and the biases) and `task` (m, A, and how foreign adaptives are used). The base itself is called as a
function of composed weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from profcil.model.net import Net, Tensors

SHARE = 0.2  # A starts at this share of B and the gate at the rest, so that θ starts at B


def attach(net: Net, top: int) -> None:
    """Adds the blocks to a model whose base is a TextCNN, with space for `top` foreign adaptives. There is space for at
    least one, because empty tensors would be a special case everywhere."""
    top = max(1, top)
    embedding = deepcopy(net.base.embedding)
    net.attach("words", nn.ModuleDict({"embedding": embedding}))  # type: ignore[dict-item]
    convolutions = deepcopy(net.base.convolutions)
    net.attach("shared", nn.ModuleDict({"convolutions": convolutions}))  # type: ignore[dict-item]
    banks = [c.weight for c in net.base.convolutions]  # type: ignore[union-attr]
    gates = [torch.zeros(len(b)) for b in banks]
    adaptives = [torch.zeros(b.shape) for b in banks]
    strength = torch.zeros(top)
    projections = [torch.zeros(len(b), top * len(b)) for b in banks]
    task = nn.ModuleDict()
    task["gate"] = nn.ParameterList(gates)
    task["adaptive"] = nn.ParameterList(adaptives)
    task["strength"] = nn.ParameterList([strength])
    task["mix"] = nn.ParameterList(projections)
    net.attach("task", task)


def banks_of(shared: Mapping[str, Tensor]) -> list[Tensor]:
    """The filter banks among the tensors of `shared`, one per width."""
    widths = len(shared) // 2  # a weight and a bias for each
    return [shared[f"convolutions.{i}.weight"] for i in range(widths)]


def part(task: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """The tensors of one part of `task`, one per width."""
    size = sum(k.startswith(f"{name}.") for k in task)
    return [task[f"{name}.{i}"] for i in range(size)]


def named(name: str, tensors: Sequence[Tensor]) -> Tensors:
    """The inverse of `part`: tensors by their names in `task`."""
    return {f"{name}.{i}": t for i, t in enumerate(tensors)}


def parameters_of(net: Net, block: str) -> Tensors:
    """The parameters of one block by name."""
    return dict(getattr(net, block).named_parameters())


def fresh_task(shared: Mapping[str, Tensor], top: int) -> Tensors:
    """The initial tensors of a task: A = B/5, sigmoid(m) = 4/5, and foreign adaptives with weight 0."""
    top = max(1, top)
    banks = banks_of(shared)
    open_gate = log(1 / SHARE - 1)
    gates = [b.new_full((len(b),), open_gate) for b in banks]
    adaptives = [SHARE * b for b in banks]
    strength = banks[0].new_zeros(top)
    projections = [b.new_zeros(len(b), top * len(b)) for b in banks]
    filters = named("gate", gates) | named("adaptive", adaptives)
    foreign = named("strength", [strength]) | named("mix", projections)
    return filters | foreign


def compose(banks: Sequence[Tensor], gates: Sequence[Tensor], adaptives: Sequence[Tensor]) -> list[Tensor]:
    """θ = B ⊙ g + A, where `gates` are g = sigmoid(m)."""
    composed = []
    for bank, gate, adaptive in zip(banks, gates, adaptives, strict=True):
        gated = bank * gate[:, None, None]
        composed.append(gated + adaptive)
    return composed


def features(net: Net, tokens: Tensor, foreign: Sequence[Tensor]) -> Tensor:
    """Base features under a client's own θ and the foreign adaptives, [n, filters, embedding, width] for each width.

    Each foreign bank, times its strength α, is a separate convolution. Its features are projected to the size of the
    local features and added. This equals concatenation and a linear layer [I | P].
    """
    shared = parameters_of(net, "shared")
    task = parameters_of(net, "task")
    weights = parameters_of(net, "words")
    gates = [m.sigmoid() for m in part(task, "gate")]
    local = compose(banks_of(shared), gates, part(task, "adaptive"))
    number = len(foreign[0])
    alpha = task["strength.0"][:number, None, None, None]
    for i, (own, others) in enumerate(zip(local, foreign, strict=True)):
        bias = shared[f"convolutions.{i}.bias"]
        scaled = (alpha * others).flatten(0, 1)
        weights[f"convolutions.{i}.weight"] = torch.cat([own, scaled])
        missing = number * len(bias)
        weights[f"convolutions.{i}.bias"] = F.pad(bias, (0, missing))
    sizes = [len(b) * (1 + number) for b in local]
    computed = functional_call(net.base, weights, (tokens,))
    joined = []
    for u, projection in zip(computed.split(sizes, 1), part(task, "mix"), strict=True):
        joined.append(_add_projected(u, projection))
    return torch.cat(joined, 1)


def _add_projected(features: Tensor, projection: Tensor) -> Tensor:
    """Local features plus the projection of the foreign features that follow them."""
    own, others = features.tensor_split([len(projection)], 1)
    used = projection[:, : others.shape[1]]
    return own + F.linear(others, used)


def add_finished_task(own: Tensors, like: Sequence[Tensor]) -> Tensors:
    """The penalty for past tasks, with the task that has just ended added. With the m and A of past tasks fixed,
    Σ_i ½‖B⊙σ(m_i) + A_i − θ*_i‖² is quadratic in B: ½ Σ h (B − c)² plus a constant, where h = Σ σ(m_i)² and c is the
    mean of B*_i weighted by σ(m_i)²."""
    if not own:
        hold = [b.new_zeros(len(b)) for b in like]
        centre = [b.clone() for b in like]
        return {**named("hold", hold), **named("centre", centre)}
    hold = []
    centre = []
    parts = [part(own, name) for name in ("gate", "hold", "centre", "bank")]
    for gate, old_hold, old_centre, bank in zip(*parts, strict=True):
        fresh = gate.sigmoid().square()
        new_hold = old_hold + fresh
        rate = fresh / new_hold
        hold.append(new_hold)
        share = rate[:, None, None]
        centre.append(old_centre.lerp(bank, share))
    return {**named("hold", hold), **named("centre", centre)}


def drift(shared: Sequence[Tensor], hold: Sequence[Tensor], centre: Sequence[Tensor]) -> Tensor:
    """½ Σ h (B − c)²."""
    sums = []
    for bank, h, c in zip(shared, hold, centre, strict=True):
        square = (bank - c).square()
        weighted = h[:, None, None] * square
        sums.append(weighted.sum())
    return torch.stack(sums).sum() / 2
