"""How sure the memory is of its class means, and linear discriminants that take it into account.

The stored mean of class y is the true one plus an error. Its covariance is a share v_y of the within-class covariance:

    v_y = 1/n_y + ρ c_y + ω t_y

    n_y  examples
    c_y  Σ_c n_cy² / n_y² over the clients c that measured it: 1 if one client did
    t_y  age: how often the base has moved since, and the mean was carried or left behind
    ρ    variance of class means between clients, in units of the within-class variance (`client_sums`)
    ω    variance that a position adds to a stored mean, in the same unit: the residual of its transport (`return_sums`)

c_y and t_y are the `dispersion` of a class. n²c and n²t are additive over disjoint examples. ρ and ω are ratios of sums
over classes and positions, by the method of moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profcil.memory import linear, symmetric
from profcil.memory.linear import TINY

NEGLIGIBLE = 0.02  # the v of a mean that counts as sure: fifty examples
PRIOR = 5.0  # examples at which a class counts half for the centre of the classes
MOST = 4.0  # times the noise that the pooled covariance explains, at most


@dataclass(frozen=True)
class ShrunkHead:
    """A linear head, and the means that it was solved from."""

    weight: Tensor
    bias: Tensor
    mean: Tensor


# -- the variance of stored means -------------------------------------------------------------------------------------


def fresh_dispersion(count: Tensor) -> Tensor:
    """c = 1 and t = 0, [classes, 2]: rows that one client has just measured."""
    one = count.new_ones(len(count), dtype=torch.float32)
    return torch.stack([one, torch.zeros_like(one)], 1)


def older(dispersion: Tensor) -> Tensor:
    """The dispersion after the base has moved once more."""
    return dispersion + dispersion.new_tensor([0.0, 1.0])


def no_sums(like: Tensor) -> Tensor:
    """The sums behind ρ and ω before anything was measured."""
    return like.new_zeros(4, dtype=torch.float64)


def ratios(sums: Tensor) -> tuple[Tensor, Tensor]:
    """ρ and ω, at least 0; 0 where nothing was measured."""
    found = sums[::2] / sums[1::2].clamp(min=TINY)
    between, drift = found.clamp(min=0.0)
    return between, drift


def mean_variance(count: Tensor, dispersion: Tensor, sums: Tensor) -> Tensor:
    """v of every class."""
    between, drift = ratios(sums.double())
    shares = dispersion.double()
    return 1 / count.double().clamp(min=1.0) + between * shares[:, 0] + drift * shares[:, 1]


def client_sums(counts: Sequence[Tensor], means: Sequence[Tensor], rows: Sequence[Tensor], variance: Tensor) -> Tensor:
    """Numerator and denominator of ρ from the class means of several clients; `rows` are their classes. `variance` is
    the pooled within-class variance of each feature, around the means of all clients.

    E Σ_c n_c (ū_c − ū)² = (k − 1) σ² + (n − Σ n_c²/n) ρσ² for k clients with n examples of a class.
    """
    n = torch.cat(list(counts)).double()
    u = torch.cat(list(means)).double()
    row = torch.cat(list(rows))
    classes = int(row.max()) + 1
    total = n.new_zeros(classes).index_add_(0, row, n)
    pooled = u.new_zeros(classes, u.shape[1]).index_add_(0, row, n[:, None] * u)
    pooled /= total.clamp(min=TINY)[:, None]
    scatter = (n[:, None] * (u - pooled[row]).square()).sum(0)
    within = (total.sum() * variance.double() - scatter) / (total.sum() - len(n)).clamp(min=1.0)
    known = within > linear.ROUNDING * variance.double().mean()
    squares = n.new_zeros(classes).index_add_(0, row, n.square())
    weight = (total - squares / total.clamp(min=TINY)).sum()
    if not bool(known.any()) or not float(weight):
        return n.new_zeros(2)
    excess = (scatter[known] / within[known]).mean() - (len(n) - len(row.unique()))
    return torch.stack([excess, weight])


def return_sums(
    stored: tuple[Tensor, Tensor, Tensor], fresh: tuple[Tensor, Tensor, Tensor], sums: Tensor, variance: Tensor
) -> Tensor:
    """Numerator and denominator of ω from classes that are measured again: mean, count and dispersion of the stored and
    of the fresh rows. E (ū − ū')² = (v + v') σ², and of that ωt is not known yet."""
    apart = (stored[0].double() - fresh[0].double()).square()
    known = variance > linear.ROUNDING * variance.mean()
    if not len(apart) or not bool(known.any()):
        return sums.new_zeros(2)
    measured = (apart[:, known] / variance.double()[known]).mean(1)
    without_age = torch.cat([sums[:2], sums.new_zeros(2)])
    expected = mean_variance(*stored[1:], without_age) + mean_variance(*fresh[1:], without_age)
    weight = 1 / expected
    age = stored[2][:, 1].double()
    return torch.stack([(weight * (measured - expected)).sum(), (weight * age).sum()])


# -- pseudo-features --------------------------------------------------------------------------------------------------


def pooled_spread(spread: Tensor, count: Tensor) -> Tensor:
    """Class spreads shrunk towards their pooled variance σ̄², by empirical Bayes:

        σ̃² = (n σ² + κ σ̄²) / (n − 1 + κ)

    the posterior mean for variances of an inverse gamma distribution. κ follows from how much the unbiased variances of
    classes differ beyond what their counts explain. A class with one example has the pooled variance.
    """
    n = count.double()[:, None]
    square = spread.double().square()
    pooled = (n * square).sum(0) / (n - 1).sum().clamp(min=1.0)
    kappa = prior_examples(square, n, pooled)
    return ((n * square + kappa * pooled) / (n - 1 + kappa)).sqrt().to(spread.dtype)


def prior_examples(square: Tensor, n: Tensor, pooled: Tensor) -> float:
    """κ = 4 + 2/c, where c is the squared coefficient of variation of the true variances: an unbiased variance from n
    examples, relative to the pooled one, has the variance 2/(n − 1) + c (1 + 2/(n − 1))."""
    several = n[:, 0] > 1
    varies = pooled > linear.ROUNDING * pooled.mean()
    if not bool(several.any()) or not bool(varies.any()):
        return 4.0
    free = n[several] - 1
    ratio = (square[several] * n[several] / free)[:, varies] / pooled[varies]
    excess = (ratio - 1).square().mean(1, keepdim=True) - 2 / free
    found = (free * excess).sum() / (free + 2).sum()
    return 4 + 2 / max(float(found), 1e-3)


# -- discriminants ----------------------------------------------------------------------------------------------------


def shrunk_discriminants(
    mean: Tensor, variance: Tensor, examples: float, covariance: Tensor, penalised: Tensor
) -> ShrunkHead:
    """Linear discriminants from means with errors.

    In the metric of the penalised covariance P, with the centre g of the classes: the error of μ̂_y has the expected
    square T v_y (`noise_trace`), and the deviation of a true mean from g has the mean square s. The posterior mean of
    μ_y is g + m_y, and the variance left in it a share u_y of that of an example:

        m_y = (1 − B_y)(μ̂_y − g)    B_y = T v_y / (s + T v_y)    u_y = (1 − B_y) v_y

    An example of class y is then spread by (1 + u_y)Σ around g + m_y: its log-density is, but for a constant,

        −½‖x − g − m_y‖² / (1 + u_y) − ½ T log(1 + u_y)

    with T in place of the number of dimensions. For a linear score ‖x − g‖² is replaced by its mean T + s:

        (m_yᵀ(x − g) − ½‖m_y‖² − ½(T + s)) / (1 + u_y) − ½ T log(1 + u_y)

    For many examples of every class v_y → 0, and these are the usual discriminants but for a constant.
    """
    factor = symmetric.cholesky(penalised)
    white = torch.linalg.solve_triangular(factor, mean.double().T, upper=False).T
    v = variance.double()
    sure = 1 / (1 + PRIOR * v)
    centre = (sure[:, None] * white).sum(0) / sure.sum()
    apart = white - centre
    squares = apart.square().sum(1)
    noise = noise_trace(squares, v, explained_noise(factor, covariance, examples))
    signal = (sure * (squares - noise * v)).sum() / sure.sum()
    signal = signal.clamp(min=1e-3 * float(squares.mean()) + TINY)
    kept = signal / (signal + noise * v)
    m = kept[:, None] * apart
    wider = 1 + kept * v
    weight = torch.linalg.solve_triangular(factor.T, (m / wider[:, None]).T, upper=True).T
    constant = (m @ centre) + 0.5 * m.square().sum(1) + 0.5 * (noise + signal)
    bias = -constant / wider - 0.5 * noise * wider.log()
    origin = (sure[:, None] * mean.double()).sum(0) / sure.sum()
    return ShrunkHead(weight, bias, origin + kept[:, None] * (mean.double() - origin))


def explained_noise(factor: Tensor, covariance: Tensor, examples: float) -> Tensor:
    """tr(P⁻¹Σ) for an example that had no influence on P = Σ̂ + penalty: tr(P⁻¹Σ̂) is too small, since P has been fitted
    to its examples. Leaving each of N examples out gives T / (1 − T/N)."""
    inside = (torch.cholesky_inverse(factor) * covariance).sum()
    left = (1 - inside / examples).clamp(min=1 / MOST)
    return inside / left


def noise_trace(squares: Tensor, v: Tensor, explained: Tensor) -> Tensor:
    """T, the expected squared error of a mean with v = 1, between two estimates.

    The noise that the pooled covariance explains is a lower bound: a class with few examples has hardly any part in
    that covariance. The squared deviations of the means have the expectation s + T v, so that their slope over v is
    another estimate. It is too large where uncertain classes lie further out. T is the geometric mean of both.
    """
    weight = 1 / (NEGLIGIBLE + v).square()
    weight = weight / weight.sum()
    around = v - (weight * v).sum()
    variation = (weight * around.square()).sum()
    if float(variation) < TINY:
        return explained
    slope = (weight * around * squares).sum() / variation
    bounded = torch.minimum(torch.maximum(slope, explained), MOST * explained)
    return (bounded * explained).sqrt()
