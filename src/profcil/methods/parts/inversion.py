"""Gradient inversion: a vector is sent as the gradient that it causes in a shared random network, and found again.

The network is a perceptron with sigmoids, so that its gradient is smooth in the input, and is never trained. The
gradient of the last bias, softmax minus the one-hot label, is negative at the label alone; the input is what L-BFGS
arrives at when it matches the gradient. Each tensor counts by its relative error: the first layer's gradient holds
the input but is thousands of times smaller than the last one's. From zero this takes a handful of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = (128, 128, 64)

Named = Mapping[str, Tensor]


def mirror(columns: int, classes: int, generator: torch.Generator) -> nn.ParameterDict:
    """The shared network's layers, drawn uniformly within ±1/√(inputs)."""
    sizes, tensors = (columns, *HIDDEN, classes), {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        for name, shape in ((f"weight{layer}", (outputs, inputs)), (f"bias{layer}", (outputs,))):
            tensors[name] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
    return nn.ParameterDict(tensors)


def answer(tensors: Named, x: Tensor) -> Tensor:
    """The network's logits."""
    last = len(tensors) // 2 - 1
    for layer in range(last + 1):
        x = F.linear(x, tensors[f"weight{layer}"], tensors[f"bias{layer}"])
        x = x if layer == last else x.sigmoid()
    return x


def leak(tensors: Named, x: Tensor, label: int, *, matching: bool = False) -> dict[str, Tensor]:
    """The gradient of the cross-entropy of one labelled vector; differentiable in the vector when `matching`."""
    with torch.enable_grad():
        own = {k: t.detach().clone().requires_grad_() for k, t in tensors.items()}  # see `invert`
        loss = -answer(own, x).log_softmax(-1)[label]
        grads = torch.autograd.grad(loss, list(own.values()), create_graph=matching)
    return dict(zip(own, grads, strict=True))


def label_of(gradient: Named) -> int:
    """The label behind a gradient: where the last bias would rise."""
    return int(gradient[f"bias{len(gradient) // 2 - 1}"].argmin())


def invert(tensors: Named, gradient: Named, iterations: int = 300) -> Tensor:
    """The vector whose gradient this is. Deterministic to the bit: the search begins at zero, sums in the order of
    names, and computes on copies, since where in memory a tensor lies (after loading, say) can change rounding."""
    gradient = {k: g.clone() for k, g in sorted(gradient.items())}
    label, first = label_of(gradient), tensors["weight0"]
    found = first.new_zeros(first.shape[1], requires_grad=True)
    size = {k: g.square().sum().clamp(min=torch.finfo(g.dtype).tiny) for k, g in gradient.items()}
    search = torch.optim.LBFGS([found], lr=1.0, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    def mismatch() -> Tensor:
        search.zero_grad()
        own = leak(tensors, found, label, matching=True)
        loss = torch.stack([(own[k] - g).square().sum() / size[k] for k, g in gradient.items()]).sum()
        loss.backward()
        return loss.detach()

    search.step(mismatch)
    return found.detach()
