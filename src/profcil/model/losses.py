"""The losses that methods share, as formulas.

A loss of a training phase is a function of (model, batch). The model is a `Net`, or a `Tail` where a phase trains on
features. Values that carry an axis of clients can take the place of tensors, as with torch's own functions
(`__torch_function__`): so one loss serves one client and a batch of clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

from profcil.data.bundle import Inputs

if TYPE_CHECKING:
    from profcil.model.net import Net, Tail


@wrap_torch_function(lambda logits, y, allowed: (logits, y, allowed))
def cross_entropy(logits: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
    """Mean cross-entropy over the last batch axis. Classes outside the mask `allowed` do not compete."""
    lowest = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(~allowed.unsqueeze(-2), lowest)
    log_p = logits.log_softmax(-1)
    log_p_of_truth = log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return -log_p_of_truth.mean(-1)


def soft_cross_entropy(logits: Tensor, target: Tensor, allowed: Tensor) -> Tensor:
    """Mean cross-entropy between the soft-max of target logits and that of other logits, over the classes in the mask
    `allowed`."""
    lowest = torch.finfo(logits.dtype).min
    excluded = ~allowed
    log_p = logits.masked_fill(excluded, lowest).log_softmax(-1)
    q = target.masked_fill(excluded, lowest).softmax(-1)
    terms = q * log_p.masked_fill(excluded, 0.0)
    return -terms.sum(-1).mean(-1)


@wrap_torch_function(lambda a, b, temperature: (a, b))
def contrast(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """The symmetric contrastive loss between two views of a batch: the positive of a row is the same row of the other
    view, its negatives are the other rows."""
    similarity = a @ b.mT / temperature
    target = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target))


def supervised(net: Net, batch: Mapping[str, Any]) -> Tensor:
    """Cross-entropy of the model on weakly augmented inputs: FedAvg's loss."""
    views = net.weak(batch["inputs"], batch["rng"])
    logits = net(*views)
    return cross_entropy(logits, batch["y"], batch["allowed"])


def classification(tail: Tail, batch: Mapping[str, Any]) -> Tensor:
    """Cross-entropy of adapter and head on features."""
    logits = tail.classify(batch["u"])
    return cross_entropy(logits, batch["y"], batch["allowed"])


def consistency(net: Net, inputs: Inputs, rng: torch.Generator, temperature: float) -> Tensor:
    """The contrastive loss between two strong views of a batch, through base and projector."""
    first = net.strong(inputs, rng)
    second = net.strong(inputs, rng)
    a, b = net.encode(first, second)
    return contrast(net.project(a), net.project(b), temperature)
