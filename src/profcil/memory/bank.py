"""The projected memory: per class a mean, a diagonal spread and a count of base features.

Moments add up: what several clients measured under one model merges into what one client would have measured on all
their data (the paper's global-memory refresh). Everything here is tensors in, tensors out; clients and rounds are
unknown. Rows follow `labels`, ascending class ids. The adapted-space memory M^z is the same thing with its spread
folded into one radius per class, ρ² = (1/d) E‖z − μ‖².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.tensors import to_device

FLOOR = 1e-8  # ε of the variance, where rounding would make it negative


@dataclass(frozen=True)
class Moments:
    """First and second moments per class, as clients send them."""

    labels: tuple[int, ...]
    mean: Tensor  # [classes, d]
    second: Tensor  # [classes, d], mean of u ⊙ u; [classes, 1] where a radius is enough
    count: Tensor  # [classes], int32


@dataclass(frozen=True)
class Bank:
    """What the server keeps and broadcasts: M^u = {(μ_y, σ_y, n_y)}."""

    labels: tuple[int, ...]
    mean: Tensor
    spread: Tensor
    count: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def moments(self) -> Moments:
        second = self.spread.double() ** 2 + fold(self.mean.double() ** 2, self.spread.shape[1])
        return Moments(self.labels, self.mean, second, self.count)

    def moved(self, shift: Tensor) -> Bank:
        """Transport: means move, spreads and counts do not."""
        return replace(self, mean=self.mean + shift)


def fold(square: Tensor, width: int) -> Tensor:
    """Squares per coordinate as they are, or their average where only a radius is kept."""
    return square if width == square.shape[1] else square.mean(1, keepdim=True)


def empty_bank(like: Tensor, width: int) -> Bank:
    """No classes yet, of features like this one; on its device."""
    none = like.new_zeros(0, dtype=torch.int32)
    return Bank((), like.new_zeros(0, len(like)), like.new_zeros(0, width), none)


def measure(features: Tensor, y: Tensor, *, radius: bool = False) -> Moments:
    """Per-class moments of some features."""
    labels = torch.unique(y)  # ascending
    return moments_of_rows(features, torch.searchsorted(labels, y), tuple(labels.tolist()), radius=radius)


def moments_of_rows(features: Tensor, rank: Tensor, labels: Sequence[int], *, radius: bool = False) -> Moments:
    """The same where each one's place among the labels is known. Sums are in float64: merging is exact to float32."""
    one_hot = torch.nn.functional.one_hot(rank, len(labels)).double().T
    count, wide = one_hot.sum(1), features.double()
    mean, second = one_hot @ wide / count[:, None], one_hot @ wide.square() / count[:, None]
    second = fold(second, 1) if radius else second
    return Moments(tuple(labels), mean.float(), second.float(), count.int())


def pool(parts: Sequence[Moments]) -> Moments:
    """Count-weighted moments over several clients, classes in any combination (global-memory refresh)."""
    labels = sorted({y for part in parts for y in part.labels})
    place = {y: i for i, y in enumerate(labels)}
    d, device = parts[0].mean.shape[1], parts[0].mean.device
    mean = torch.zeros(len(labels), d, dtype=torch.float64, device=device)
    second = mean.new_zeros(len(labels), parts[0].second.shape[1])
    count = mean.new_zeros(len(labels))
    for part in parts:
        rows = to_device(torch.tensor([place[y] for y in part.labels], dtype=torch.long), device)
        n = part.count.to(torch.float64)
        mean.index_add_(0, rows, part.mean.double() * n[:, None])
        second.index_add_(0, rows, part.second.double() * n[:, None])
        count.index_add_(0, rows, n)
    scale = count[:, None].clamp(min=1)
    return Moments(tuple(labels), (mean / scale).float(), (second / scale).float(), count.to(torch.int32))


def remember(moments: Moments) -> Bank:
    """The bank that a set of moments amounts to: σ² = max(m − μ ⊙ μ, ε)."""
    variance = moments.second.double() - fold(moments.mean.double() ** 2, moments.second.shape[1])
    variance = variance.clamp(min=FLOOR)
    return Bank(moments.labels, moments.mean, variance.sqrt().float(), moments.count)


def update(bank: Bank, fresh: Moments, merge: str = "counts") -> Bank:
    """The bank after fresh moments came in. A class it already holds is merged by counts, or replaced."""
    if not len(bank):
        return remember(fresh)
    old = bank.moments()
    if merge == "replace":
        old = select(old, [i for i, y in enumerate(old.labels) if y not in set(fresh.labels)])
    return remember(pool([old, fresh]))


def rewind(now: Bank, before: Bank, labels: Sequence[int]) -> Bank:
    """The bank with some classes set back to an earlier state; the others stay."""
    if now is before or not len(now):
        return now
    kept = select(now.moments(), [i for i, y in enumerate(now.labels) if y not in labels])
    back = select(before.moments(), [i for i, y in enumerate(before.labels) if y in labels])
    return remember(pool([kept, back]))


def select(moments: Moments, rows: Sequence[int]) -> Moments:
    """The moments of some rows."""
    index = to_device(torch.tensor(list(rows), dtype=torch.long), moments.mean.device)
    labels = tuple(moments.labels[i] for i in rows)
    return Moments(labels, moments.mean[index], moments.second[index], moments.count[index])
