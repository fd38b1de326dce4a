"""Filter banks of a TextCNN in two parts (FedWeIT, Yoon et al., 2021): θ = B ⊙ sigmoid(m) + A.

B is shared by everybody, the gate m (one number a filter) and the adaptive A belong to one task of one client. The
parts are blocks beside the base, whose tensors bear the base's own names: `words` (embedding), `shared` (B and the
biases) and `task` (m, A, and how foreign adaptives are used). The base itself serves as a function of its weights.
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

SHARE = 0.2  # of B in a fresh A; the gate starts at the rest of it, so that θ starts at B


def attach(net: Net, top: int) -> None:
    """Adds the blocks to a model whose base is a TextCNN, with room for `top` foreign adaptives, at least one: a tensor
    without entries would be an exception everywhere."""
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
    """The filter banks among the tensors of `shared`, by width."""
    return [shared[f"convolutions.{i}.weight"] for i in range(len(shared) // 2)]


def part(task: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """One part of `task`, by width."""
    return [task[f"{name}.{i}"] for i in range(sum(k.startswith(f"{name}.") for k in task))]


def named(name: str, tensors: Sequence[Tensor]) -> Tensors:
    """The reverse of `part`."""
    return {f"{name}.{i}": t for i, t in enumerate(tensors)}


def parameters_of(net: Net, block: str) -> Tensors:
    return dict(getattr(net, block).named_parameters())


def fresh_task(shared: Mapping[str, Tensor], top: int) -> Tensors:
    """The start of a task: A = B/5, sigmoid(m) = 4/5, and no use of foreign adaptives."""
    banks, top = banks_of(shared), max(1, top)
    return {
        **named("gate", [b.new_full((len(b),), log(1 / SHARE - 1)) for b in banks]),
        **named("adaptive", [SHARE * b for b in banks]),
        **named("strength", [banks[0].new_zeros(top)]),
        **named("mix", [b.new_zeros(len(b), top * len(b)) for b in banks]),
    }


def compose(banks: Sequence[Tensor], gates: Sequence[Tensor], adaptives: Sequence[Tensor]) -> list[Tensor]:
    """θ = B ⊙ g + A, with open gates g = sigmoid(m) given."""
    return [b * g[:, None, None] + a for b, g, a in zip(banks, gates, adaptives, strict=True)]


def features(net: Net, tokens: Tensor, foreign: Sequence[Tensor]) -> Tensor:
    """Base features under a client's own θ and the foreign adaptives, [n, filters, embedding, width] for each width.

    Each foreign bank, times its strength α, is a convolution of its own; what it finds is projected to the size of the
    local features and added. That is concatenation and a linear layer [I | P] after it, in the adapter's size.
    """
    shared, task, weights = (parameters_of(net, block) for block in ("shared", "task", "words"))
    local = compose(banks_of(shared), [m.sigmoid() for m in part(task, "gate")], part(task, "adaptive"))
    alpha = task["strength.0"][: len(foreign[0]), None, None, None]
    for i, (own, others) in enumerate(zip(local, foreign, strict=True)):
        bias = shared[f"convolutions.{i}.bias"]
        weights[f"convolutions.{i}.weight"] = torch.cat([own, (alpha * others).flatten(0, 1)])
        weights[f"convolutions.{i}.bias"] = F.pad(bias, (0, len(others) * len(bias)))
    found = functional_call(net.base, weights, (tokens,)).split([len(b) * (1 + len(foreign[0])) for b in local], 1)
    return torch.cat([_mixed(f, p) for f, p in zip(found, part(task, "mix"), strict=True)], 1)


def _mixed(found: Tensor, projection: Tensor) -> Tensor:
    own, others = found.tensor_split([len(projection)], 1)
    return own + F.linear(others, projection[:, : others.shape[1]])


def settled(own: Tensors, like: Sequence[Tensor]) -> Tensors:
    """The past with the task that ends now. With its m and A fixed, Σ_i ½‖B⊙σ(m_i) + A_i − θ*_i‖² is quadratic in B:
    ½ Σ h (B − c)² and a constant, where h = Σ σ(m_i)² and c is the mean of B*_i weighted by it."""
    if not own:
        return {**named("hold", [b.new_zeros(len(b)) for b in like]), **named("centre", [b.clone() for b in like])}
    fresh = [m.sigmoid().square() for m in part(own, "gate")]
    hold = [h + f for h, f in zip(part(own, "hold"), fresh, strict=True)]
    rates = [(f / h)[:, None, None] for f, h in zip(fresh, hold, strict=True)]
    centre = [c.lerp(b, r) for c, b, r in zip(part(own, "centre"), part(own, "bank"), rates, strict=True)]
    return {**named("hold", hold), **named("centre", centre)}


def drift(shared: Sequence[Tensor], hold: Sequence[Tensor], centre: Sequence[Tensor]) -> Tensor:
    """½ Σ h (B − c)²."""
    each = [(h[:, None, None] * (b - c).square()).sum() for b, h, c in zip(shared, hold, centre, strict=True)]
    return torch.stack(each).sum() / 2
