"""The projected memory: a mean, a diagonal spread and a count of base features for every class.

Moments are additive. The pooled moments of several clients under one model are those that one client would measure on
all their data (the paper's global-memory refresh). The functions here take and return tensors; clients and rounds do
not appear. Rows follow `labels`, ascending class ids. The adapted-space memory M^z has one radius per class in place of
the diagonal spread, ρ² = (1/d) E‖z − μ‖².
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
    second: Tensor  # [classes, d], mean of u ⊙ u; [classes, 1] where only a radius is kept
    count: Tensor  # [classes], int32


@dataclass(frozen=True)
class Bank:
    """The memory M^u = {(μ_y, σ_y, n_y)} that the server stores and broadcasts."""

    labels: tuple[int, ...]
    mean: Tensor
    spread: Tensor
    count: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def moments(self) -> Moments:
        """The moments behind the bank."""
        second = self.spread.double() ** 2 + to_width(self.mean.double() ** 2, self.spread.shape[1])
        return Moments(self.labels, self.mean, second, self.count)

    def shifted(self, shift: Tensor) -> Bank:
        """The bank after transport: means move, spreads and counts do not."""
        return replace(self, mean=self.mean + shift)


def to_width(square: Tensor, width: int) -> Tensor:
    """Squares per coordinate, or their mean where only a radius is kept (width 1)."""
    return square if width == square.shape[1] else square.mean(1, keepdim=True)


def empty_bank(like: Tensor, width: int) -> Bank:
    """A bank without classes, for features of the length, dtype and device of `like`."""
    count = like.new_zeros(0, dtype=torch.int32)
    return Bank((), like.new_zeros(0, len(like)), like.new_zeros(0, width), count)


def measure(features: Tensor, y: Tensor, *, radius: bool = False) -> Moments:
    """Moments per class of features with labels y."""
    labels = torch.unique(y)  # ascending
    return moments_of_rows(features, torch.searchsorted(labels, y), tuple(labels.tolist()), radius=radius)


def moments_of_rows(features: Tensor, rank: Tensor, labels: Sequence[int], *, radius: bool = False) -> Moments:
    """The same with `rank`, the index of each row's class in `labels`. Sums are in float64, so that pooling is exact to
    float32."""
    one_hot = torch.nn.functional.one_hot(rank, len(labels)).double().T
    wide = features.double()
    count = one_hot.sum(1)
    mean = one_hot @ wide / count[:, None]
    second = one_hot @ wide.square() / count[:, None]
    if radius:
        second = to_width(second, 1)
    return Moments(tuple(labels), mean.float(), second.float(), count.int())


def pool(parts: Sequence[Moments]) -> Moments:
    """Count-weighted moments over several clients, each with any classes (global-memory refresh)."""
    labels = sorted({y for part in parts for y in part.labels})
    row_of = {y: row for row, y in enumerate(labels)}
    d = parts[0].mean.shape[1]
    device = parts[0].mean.device
    mean = torch.zeros(len(labels), d, dtype=torch.float64, device=device)
    second = mean.new_zeros(len(labels), parts[0].second.shape[1])
    count = mean.new_zeros(len(labels))
    for part in parts:
        rows = to_device(torch.tensor([row_of[y] for y in part.labels], dtype=torch.long), device)
        n = part.count.to(torch.float64)
        mean.index_add_(0, rows, part.mean.double() * n[:, None])
        second.index_add_(0, rows, part.second.double() * n[:, None])
        count.index_add_(0, rows, n)
    scale = count[:, None].clamp(min=1)
    return Moments(tuple(labels), (mean / scale).float(), (second / scale).float(), count.to(torch.int32))


def bank_from_moments(moments: Moments) -> Bank:
    """The bank with σ² = max(m − μ ⊙ μ, ε)."""
    variance = moments.second.double() - to_width(moments.mean.double() ** 2, moments.second.shape[1])
    variance = variance.clamp(min=FLOOR)
    return Bank(moments.labels, moments.mean, variance.sqrt().float(), moments.count)


def update(bank: Bank, fresh: Moments, merge: str = "counts") -> Bank:
    """The bank with fresh moments. A class that it holds already is merged by counts, or replaced."""
    if not len(bank):
        return bank_from_moments(fresh)
    old = bank.moments()
    if merge == "replace":
        old = select(old, [i for i, y in enumerate(old.labels) if y not in set(fresh.labels)])
    return bank_from_moments(pool([old, fresh]))


def restore(now: Bank, before: Bank, labels: Sequence[int]) -> Bank:
    """The bank `now` with some classes as they were in `before`; a class that `before` lacks is removed."""
    if not len(now):
        return now
    others = select(now.moments(), [i for i, y in enumerate(now.labels) if y not in labels])
    restored = select(before.moments(), [i for i, y in enumerate(before.labels) if y in labels])
    return bank_from_moments(pool([others, restored]))


def select(moments: Moments, rows: Sequence[int]) -> Moments:
    """The moments of some rows."""
    index = to_device(torch.tensor(list(rows), dtype=torch.long), moments.mean.device)
    labels = tuple(moments.labels[i] for i in rows)
    return Moments(labels, moments.mean[index], moments.second[index], moments.count[index])
