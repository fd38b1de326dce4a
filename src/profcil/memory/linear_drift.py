"""The transport of a `Summary` by one linear map: how features have drifted is fitted by ridge regression from sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.memory.linear import FLOOR, Summary, append_one
from profcil.memory.symmetric import add_to_diagonal, solve, symmetrise


@dataclass(frozen=True)
class Drift:
    """Sums over examples of the old ũ_o and of the change δ of u."""

    old: Tensor  # [d + 1, d + 1], Σ ũ_o ũ_oᵀ
    cross: Tensor  # [d + 1, d], Σ ũ_o δᵀ
    square: Tensor  # [d, d], Σ δδᵀ


def drift_of(s: Summary, anchors: int, moving: int) -> Drift:
    """The drift sums in a summary whose features are [u; a; others; δ]: the moving features under the new base,
    `anchors` fixed ones, any others, and the change δ of the moving ones. The old features are ũ_o = [u − δ; a; 1]."""
    width = s.mean.shape[1]
    old = range(moving + anchors)
    change = range(width - moving, width)
    rows = torch.tensor([*old, width, *change], device=s.gram.device)
    gram = s.gram[rows][:, rows]
    gram[:moving] -= gram[-moving:]
    gram[:, :moving] -= gram[:, -moving:]
    return split_drift(gram, moving)


def drift_rows(before: Tensor, after: Tensor) -> Tensor:
    """[ũ_o; δ] of some examples, from their features under the old and the new base. The second-moment matrix of
    these rows has the drift sums."""
    change = after.double() - before.double()
    return torch.cat([append_one(before), change], 1)


def split_drift(gram: Tensor, moving: int) -> Drift:
    """The drift sums in the second-moment matrix of [ũ_o; δ]."""
    width = len(gram) - moving
    old = gram[:width, :width]
    cross = gram[:width, width:]
    square = gram[width:, width:]
    return Drift(old, cross, square)


def fit_drift(d: Drift, ridge: float) -> tuple[Tensor, Tensor]:
    """B = (Σ ũ_oũ_oᵀ + ridge·diag)⁻¹ Σ ũ_oδᵀ, and the second moment of the residual δ − Bᵀũ_o."""
    diagonal = d.old.diagonal().clamp(min=FLOOR)
    penalised = add_to_diagonal(d.old, ridge * diagonal)
    shift = solve(penalised, d.cross)
    mixed = shift.T @ d.cross
    residual = d.square - mixed - mixed.T + shift.T @ d.old @ shift
    examples = d.old[-1, -1]
    return shift, symmetrise(residual) / examples


def carried_means(mean: Tensor, shift: Tensor) -> Tensor:
    """μ + Bᵀ[μ; 1], in float64."""
    return mean.double() + append_one(mean) @ shift


def apply_drift(s: Summary, shift: Tensor, residual: Tensor) -> Summary:
    """The summary after a linear drift: μ ← μ + Bᵀ[μ; 1], and G by congruence with I + [B 0].

    The residual covariance is added once per example, so that the variance of classes grows as that of real features
    did. B reads the first features, as many as it has rows (and the constant), and moves as many as it has columns. All
    later features stay.
    """
    d = shift.shape[1]
    width = s.mean.shape[1]
    rows = [*range(len(shift) - 1), width]
    wide = shift.new_zeros(width + 1, d)
    wide[rows] = shift
    mean = s.mean.clone()
    mean[:, :d] += append_one(s.mean) @ wide
    gram = s.gram.clone()
    gram[:, :d] += s.gram @ wide  # I + [B 0] is mostly I: update the columns, then the rows
    gram[:d] += wide.T @ gram
    gram[:d, :d] += s.count.sum() * residual
    return replace(s, mean=mean, gram=symmetrise(gram))
