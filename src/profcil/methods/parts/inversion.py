"""Gradient inversion: a vector is sent as the gradient that it causes in a shared random network, and recovered.

The network is a perceptron with sigmoids, so that its gradient is smooth in the input. It is never trained. The
gradient of the last bias, softmax minus the one-hot label, is negative only at the label. The input is found by L-BFGS,
which matches the gradient. The error of each tensor is relative: the first layer's gradient contains the input but is
thousands of times smaller than the last layer's. From zero this takes few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = (128, 128, 64)

Named = Mapping[str, Tensor]


def make_shared_network(columns: int, classes: int, generator: torch.Generator) -> nn.ParameterDict:
    """The shared network's parameters, uniform within ±1/√(inputs)."""
    tensors: dict[str, Tensor] = {}
    for layer, (inputs, outputs) in enumerate(pairwise((columns, *HIDDEN, classes))):
        bound = inputs**-0.5
        weight = torch.empty(outputs, inputs)
        bias = torch.empty(outputs)
        tensors[f"weight{layer}"] = weight.uniform_(-bound, bound, generator=generator)
        tensors[f"bias{layer}"] = bias.uniform_(-bound, bound, generator=generator)
    return nn.ParameterDict(tensors)


def network_logits(network: Named, x: Tensor) -> Tensor:
    last = len(network) // 2 - 1
    for layer in range(last + 1):
        weight = network[f"weight{layer}"]
        bias = network[f"bias{layer}"]
        x = F.linear(x, weight, bias)
        if layer < last:
            x = x.sigmoid()
    return x


def gradient_of(network: Named, x: Tensor, label: int, *, differentiable: bool = False) -> dict[str, Tensor]:
    """The gradient of the cross-entropy of one labelled vector; on request differentiable in the vector."""
    with torch.enable_grad():
        own = {k: t.detach().clone().requires_grad_() for k, t in network.items()}  # copies, as `invert` explains
        loss = -network_logits(own, x).log_softmax(-1)[label]
        grads = torch.autograd.grad(loss, list(own.values()), create_graph=differentiable)
    return dict(zip(own, grads, strict=True))


def label_of(gradient: Named) -> int:
    """The label of the vector that caused a gradient: the only negative entry of the last bias."""
    last = len(gradient) // 2 - 1
    return int(gradient[f"bias{last}"].argmin())


def invert(network: Named, gradient: Named, iterations: int = 300) -> Tensor:
    """The vector that caused this gradient. Deterministic to the bit: the search starts at zero, sums in the order of
    names, and computes on copies, since the memory alignment of a tensor (e.g. after loading) can change rounding."""
    gradient = {k: g.clone() for k, g in sorted(gradient.items())}
    label = label_of(gradient)
    first = network["weight0"]
    vector = first.new_zeros(first.shape[1], requires_grad=True)
    size = {}
    for name, g in gradient.items():
        smallest = torch.finfo(g.dtype).tiny
        size[name] = g.square().sum().clamp(min=smallest)
    search = torch.optim.LBFGS([vector], lr=1.0, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    def mismatch() -> Tensor:
        search.zero_grad()
        own = gradient_of(network, vector, label, differentiable=True)
        errors = []
        for name, g in gradient.items():
            error = (own[name] - g).square().sum()
            errors.append(error / size[name])
        loss = torch.stack(errors).sum()
        loss.backward()
        return loss.detach()

    search.step(mismatch)
    return vector.detach()
