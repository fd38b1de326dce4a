"""The projected memory: a mean, a diagonal spread and a count of base features for every class.

Moments are additive. The pooled moments of several clients under one model are those that one client would measure on
all their data (the paper's global-memory refresh). The functions here take and return tensors; clients and rounds do
not appear. Rows follow `labels`, ascending class ids. The adapted-space memory M^z has one radius per class in place of
the diagonal spread, ρ² = (1/d) E‖z − μ‖².
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.data.bundle import to_device

FLOOR = 1e-8  # ε of the variance, where rounding would make it negative


@dataclass(frozen=True)
class Moments:
    """First and second moments per class, as clients send them."""

    labels: tuple[int, ...]
    mean: Tensor  # [classes, d]
    second: Tensor  # [classes, d], mean of u ⊙ u; [classes, 1] where only a radius is kept
    count: Tensor  # [classes], int32
    dispersion: Tensor | None = None  # [classes, 2], see `uncertainty`; None = not measured


@dataclass(frozen=True)
class Bank:
    """The memory M^u = {(μ_y, σ_y, n_y)} that the server stores and broadcasts."""

    labels: tuple[int, ...]
    mean: Tensor
    spread: Tensor
    count: Tensor
    dispersion: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def moments(self) -> Moments:
        """The moments behind the bank."""
        width = self.spread.shape[1]
        squared_mean = to_width(self.mean.double() ** 2, width)
        second = self.spread.double() ** 2 + squared_mean
        return Moments(self.labels, self.mean, second, self.count, self.dispersion)

    def shifted(self, shift: Tensor) -> Bank:
        """The bank after transport: means move, spreads and counts do not."""
        return replace(self, mean=self.mean + shift)


def to_width(square: Tensor, width: int) -> Tensor:
    """Squares per coordinate, or their mean where only a radius is kept (width 1)."""
    if width == square.shape[1]:
        return square
    return square.mean(1, keepdim=True)


def empty_bank(like: Tensor, width: int) -> Bank:
    """A bank without classes, for features of the length, dtype and device of `like`."""
    mean = like.new_zeros(0, len(like))
    spread = like.new_zeros(0, width)
    count = like.new_zeros(0, dtype=torch.int32)
    return Bank((), mean, spread, count)


def measure(features: Tensor, y: Tensor, *, radius: bool = False) -> Moments:
    """Moments per class of features with labels y."""
    labels = torch.unique(y)  # ascending
    rank = torch.searchsorted(labels, y)
    return moments_of_rows(features, rank, labels.tolist(), radius=radius)


def moments_of_rows(features: Tensor, rank: Tensor, labels: Sequence[int], *, radius: bool = False) -> Moments:
    """The same with `rank`, the index of each row's class in `labels`. Sums are in float64, so that pooling is exact to
    float32."""
    one_hot = torch.nn.functional.one_hot(rank, len(labels))
    members = one_hot.double().T
    wide = features.double()
    count = members.sum(1)
    divisor = count[:, None]
    mean = members @ wide / divisor
    second = members @ wide.square() / divisor
    if radius:
        second = to_width(second, 1)
    return Moments(tuple(labels), mean.float(), second.float(), count.int())


def pool(parts: Sequence[Moments]) -> Moments:
    """Count-weighted moments over several clients, each with any classes (global-memory refresh)."""
    labels = sorted({y for part in parts for y in part.labels})
    row_of = {y: row for row, y in enumerate(labels)}
    d = parts[0].mean.shape[1]
    device = parts[0].mean.device
    width = parts[0].second.shape[1]
    mean = torch.zeros(len(labels), d, dtype=torch.float64, device=device)
    second = mean.new_zeros(len(labels), width)
    count = mean.new_zeros(len(labels))
    for part in parts:
        rows = index_on(device, [row_of[y] for y in part.labels])
        n = part.count.to(torch.float64)
        weight = n[:, None]
        mean.index_add_(0, rows, part.mean.double() * weight)
        second.index_add_(0, rows, part.second.double() * weight)
        count.index_add_(0, rows, n)
    scale = count[:, None].clamp(min=1)
    mean /= scale
    second /= scale
    dispersion = pool_dispersion(parts, row_of, count)
    return Moments(tuple(labels), mean.float(), second.float(), count.to(torch.int32), dispersion)


def pool_dispersion(parts: Sequence[Moments], row_of: Mapping[int, int], count: Tensor) -> Tensor | None:
    """The dispersion of pooled moments: n² times it is additive. None if a part has none."""
    sums = count.new_zeros(len(count), 2)
    for part in parts:
        if part.dispersion is None:
            return None
        rows = index_on(count.device, [row_of[y] for y in part.labels])
        sums.index_add_(0, rows, part.count.double().square()[:, None] * part.dispersion.double())
    return (sums / count.square().clamp(min=1)[:, None]).float()


def index_on(device: torch.device, rows: Sequence[int]) -> Tensor:
    """Row numbers as an index on a device."""
    index = torch.tensor(rows, dtype=torch.long)
    return to_device(index, device)


def bank_from_moments(moments: Moments) -> Bank:
    """The bank with σ² = max(m − μ ⊙ μ, ε)."""
    width = moments.second.shape[1]
    squared_mean = to_width(moments.mean.double() ** 2, width)
    variance = moments.second.double() - squared_mean
    variance = variance.clamp(min=FLOOR)
    spread = variance.sqrt().float()
    return Bank(moments.labels, moments.mean, spread, moments.count, moments.dispersion)


def update(bank: Bank, fresh: Moments, merge: str = "counts") -> Bank:
    """The bank with fresh moments. A class that it holds already is merged by counts, or replaced."""
    if not len(bank):
        return bank_from_moments(fresh)
    old = bank.moments()
    if merge == "replace":
        kept = set(old.labels) - set(fresh.labels)
        old = select(old, kept)
    return bank_from_moments(pool([old, fresh]))


def restore(now: Bank, before: Bank, labels: Sequence[int]) -> Bank:
    """The bank `now` with some classes as they were in `before`; a class that `before` lacks is removed."""
    if not len(now):
        return now
    untouched = set(now.labels) - set(labels)
    others = select(now.moments(), untouched)
    restored = select(before.moments(), set(labels))
    return bank_from_moments(pool([others, restored]))


def select(moments: Moments, classes: set[int]) -> Moments:
    """The moments of some classes; those that `moments` lacks are ignored."""
    rows = [row for row, label in enumerate(moments.labels) if label in classes]
    labels = tuple(moments.labels[row] for row in rows)
    index = index_on(moments.mean.device, rows)
    mean = moments.mean[index]
    second = moments.second[index]
    dispersion = None if moments.dispersion is None else moments.dispersion[index]
    return Moments(labels, mean, second, moments.count[index], dispersion)
