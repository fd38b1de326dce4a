"""What a loss may do with values of several clients, and that everything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from profcil.accel import augmentations
from profcil.accel.cpu.client_batch import ClientBatch, NotBatchable
from profcil.data.bundle import Facts
from profcil.model.losses import contrast, cross_entropy


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_marked_functions_give_the_losses_of_each() -> None:
    logits, y = torch.randn(3, 6, 4, generator=rng(0)), torch.randint(0, 2, (3, 6), generator=rng(1))
    allowed = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    a, b = torch.randn(2, 3, 6, 5, generator=rng(2))
    many = cross_entropy(ClientBatch(logits), ClientBatch(y), ClientBatch(allowed)) + 0.5 * contrast(
        ClientBatch(a), ClientBatch(b), 0.3
    )
    each = [cross_entropy(logits[i], y[i], allowed[i]) + 0.5 * contrast(a[i], b[i], 0.3) for i in range(3)]
    assert torch.allclose(many.of, torch.stack(each), atol=1e-6)


MISUSES: dict[str, Callable[[ClientBatch], Any]] = {
    "index": lambda m: m[0],
    "length": len,
    "iteration": list,
    "attribute": lambda m: m.shape,
    "attribute with a default": lambda m: getattr(m, "is_cuda", False),
    "method": lambda m: m.mean(),
    "branch": lambda m: 1 if m else 0,
    "comparison": lambda m: m == 1,
    "membership": lambda m: m in {1, 2},
    "number": float,
    "function of torch": lambda m: F.relu(m),
    "among tensors": lambda m: torch.cat([m, torch.zeros(3)]),
    "one client's tensor": lambda m: m + torch.zeros(3),
    "tensor first": lambda m: torch.zeros(3) * m,
    "each other's": lambda m: m * m,
    "other shapes": lambda m: m + ClientBatch(torch.zeros(3, 2)),
    "draws": lambda m: torch.rand(3, generator=m),
}


@pytest.mark.parametrize("misuse", MISUSES, ids=str)
def test_operations_across_clients_are_refused(misuse: str) -> None:
    with pytest.raises((NotBatchable, TypeError)):
        MISUSES[misuse](ClientBatch(torch.ones(3)))


@pytest.mark.parametrize("view", [augmentations.weak, augmentations.strong])
def test_views_of_several_clients_draw_what_each_would_draw(view: Any) -> None:
    x = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=rng(3))
    facts = Facts("toy", "Toy", "image", 2, None, None, views=("crop", "flip", "jitter"))
    (together,) = view(facts, (x,), [rng(1), rng(2)])
    apart = [view(facts, (part,), rng(seed))[0] for part, seed in zip(x.chunk(2), (1, 2), strict=True)]
    assert torch.equal(together, torch.cat(apart)) and not torch.equal(*apart)
