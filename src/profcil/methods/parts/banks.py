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
    net.attach("words", nn.ModuleDict({"embedding": deepcopy(net.base.embedding)}))  # type: ignore[dict-item]
    net.attach("shared", nn.ModuleDict({"convolutions": deepcopy(net.base.convolutions)}))  # type: ignore[dict-item]
    banks = [c.weight for c in net.base.convolutions]  # type: ignore[union-attr]
    parts = {
        "gate": [torch.zeros(len(b)) for b in banks],
        "adaptive": [torch.zeros(b.shape) for b in banks],
        "strength": [torch.zeros(top)],
        "mix": [torch.zeros(len(b), top * len(b)) for b in banks],
    }
    net.attach("task", nn.ModuleDict({k: nn.ParameterList(v) for k, v in parts.items()}))


def banks_of(shared: Mapping[str, Tensor]) -> list[Tensor]:
    """The filter banks among the tensors of `shared`, one per width."""
    return [shared[f"convolutions.{i}.weight"] for i in range(len(shared) // 2)]


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
    return {
        **named("gate", [b.new_full((len(b),), log(1 / SHARE - 1)) for b in banks]),
        **named("adaptive", [SHARE * b for b in banks]),
        **named("strength", [banks[0].new_zeros(top)]),
        **named("mix", [b.new_zeros(len(b), top * len(b)) for b in banks]),
    }


def compose(banks: Sequence[Tensor], gates: Sequence[Tensor], adaptives: Sequence[Tensor]) -> list[Tensor]:
    """θ = B ⊙ g + A, where `gates` are g = sigmoid(m)."""
    return [b * g[:, None, None] + a for b, g, a in zip(banks, gates, adaptives, strict=True)]


def features(net: Net, tokens: Tensor, foreign: Sequence[Tensor]) -> Tensor:
    """Base features under a client's own θ and the foreign adaptives, [n, filters, embedding, width] for each width.

    Each foreign bank, times its strength α, is a separate convolution. Its features are projected to the size of the
    local features and added. This equals concatenation and a linear layer [I | P].
    """
    shared = parameters_of(net, "shared")
    task = parameters_of(net, "task")
    weights = parameters_of(net, "words")
    local = compose(banks_of(shared), [m.sigmoid() for m in part(task, "gate")], part(task, "adaptive"))
    alpha = task["strength.0"][: len(foreign[0]), None, None, None]
    for i, (own, others) in enumerate(zip(local, foreign, strict=True)):
        bias = shared[f"convolutions.{i}.bias"]
        weights[f"convolutions.{i}.weight"] = torch.cat([own, (alpha * others).flatten(0, 1)])
        weights[f"convolutions.{i}.bias"] = F.pad(bias, (0, len(others) * len(bias)))
    sizes = [len(b) * (1 + len(foreign[0])) for b in local]
    found = functional_call(net.base, weights, (tokens,)).split(sizes, 1)
    return torch.cat([_add_projected(f, p) for f, p in zip(found, part(task, "mix"), strict=True)], 1)


def _add_projected(features: Tensor, projection: Tensor) -> Tensor:
    """Local features plus the projection of the foreign features that follow them."""
    own, others = features.tensor_split([len(projection)], 1)
    return own + F.linear(others, projection[:, : others.shape[1]])


def add_finished_task(own: Tensors, like: Sequence[Tensor]) -> Tensors:
    """The penalty for past tasks, with the task that has just ended added. With the m and A of past tasks fixed,
    Σ_i ½‖B⊙σ(m_i) + A_i − θ*_i‖² is quadratic in B: ½ Σ h (B − c)² plus a constant, where h = Σ σ(m_i)² and c is the
    mean of B*_i weighted by σ(m_i)²."""
    if not own:
        hold = [b.new_zeros(len(b)) for b in like]
        centre = [b.clone() for b in like]
        return {**named("hold", hold), **named("centre", centre)}
    fresh = [m.sigmoid().square() for m in part(own, "gate")]
    hold = [h + f for h, f in zip(part(own, "hold"), fresh, strict=True)]
    rates = [(f / h)[:, None, None] for f, h in zip(fresh, hold, strict=True)]
    centre = [c.lerp(b, r) for c, b, r in zip(part(own, "centre"), part(own, "bank"), rates, strict=True)]
    return {**named("hold", hold), **named("centre", centre)}


def drift(shared: Sequence[Tensor], hold: Sequence[Tensor], centre: Sequence[Tensor]) -> Tensor:
    """½ Σ h (B − c)²."""
    each = [(h[:, None, None] * (b - c).square()).sum() for b, h, c in zip(shared, hold, centre, strict=True)]
    return torch.stack(each).sum() / 2
