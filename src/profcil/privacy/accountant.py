"""How private Gaussian noise is: ε and δ of releases, and the noise that a given ε and δ need.

A release is a vector with noise of standard deviation z·Δ, where Δ is the most that one unit (an example or a client)
can change the vector by, and z is the noise multiplier. Several releases about the same unit are together as private as
a single one with 1/z² = Σ 1/z_i², exactly (Dong, Roth and Su, 2022). For a single release δ as a function of ε has a
closed form (Balle and Wang, 2018). So these numbers are exact; no bound on Rényi divergences is needed. Drawing
participants at random would make a run more private than is said here; it is not counted.

Training with noise on gradients has many steps that each take an example by chance. Of these the Rényi divergences are
summed (Mironov, Talwar and Zhang, 2019), whole orders only: a bound, somewhat above the exact ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

LARGEST = 1e6  # of ε and of 1/z; beyond it there is practically no privacy
ORDERS = (*range(2, 65), *range(68, 257, 4), *range(272, 1025, 16))  # of Rényi divergences
ROUNDING = 1e-11  # more than the logarithm of the sum in a divergence is rounded by


def delta_of(epsilon: float, mu: float) -> float:
    """δ of a release with μ = 1/z: Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    if mu == 0:
        return 0.0
    first = normal_below(mu / 2 - epsilon / mu)
    second = log_normal_below(-mu / 2 - epsilon / mu)
    return max(0.0, first - math.exp(min(0.0, epsilon + second)))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε with this δ for μ = 1/z; infinite without noise."""
    if mu > LARGEST:
        return math.inf
    if delta_of(0.0, mu) <= delta:
        return 0.0
    return first_below(lambda epsilon: delta_of(epsilon, mu) - delta, LARGEST * LARGEST)


def multiplier_of(epsilon: float, delta: float, releases: float = 1.0) -> float:
    """The smallest noise multiplier z with which this many releases about one unit have these ε and δ."""
    inverse = first_below(lambda z: delta_of(epsilon, 1 / z) - delta, LARGEST)
    return inverse * math.sqrt(releases)


def epsilon_of_steps(multiplier: float, delta: float, steps: int, sampling: float) -> float:
    """ε of so many steps with this noise multiplier, each of which takes an example with the chance `sampling`."""
    if steps == 0:
        return 0.0
    if sampling >= 1:
        return epsilon_of(math.sqrt(steps) / multiplier, delta)
    best = math.inf
    for order in ORDERS:
        divergence = steps * (renyi_divergence(order, multiplier, sampling) + ROUNDING / (order - 1))
        best = min(best, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return max(0.0, best)


def multiplier_of_steps(epsilon: float, delta: float, steps: int, sampling: float) -> float:
    """The smallest noise multiplier with which so many steps have these ε and δ."""
    return first_below(lambda z: epsilon_of_steps(z, delta, steps, sampling) - epsilon, LARGEST)


def renyi_divergence(order: int, multiplier: float, sampling: float) -> float:
    """The Rényi divergence of a step, of a whole order α:
    log(Σ_k C(α, k) (1 − q)^(α − k) q^k exp((k² − k) / 2z²)) / (α − 1)."""
    k = np.arange(order + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, order + 1)))])
    log_choose = log_factorial[order] - log_factorial - log_factorial[::-1]
    terms = log_choose + (order - k) * math.log1p(-sampling) + k * math.log(sampling) + (k * k - k) / 2 / multiplier**2
    return float(np.logaddexp.reduce(terms)) / (order - 1)


def first_below(excess: Callable[[float], float], high: float) -> float:
    """Where a falling function reaches zero, by bisection of the logarithm. The result is on the safe side."""
    low = 1 / LARGEST
    for _ in range(200):
        middle = math.sqrt(low * high)
        if excess(middle) > 0:
            low = middle
        else:
            high = middle
    return high


def normal_below(x: float) -> float:
    """Φ(x)."""
    return math.erfc(-x / math.sqrt(2)) / 2


def log_normal_below(x: float) -> float:
    """log Φ(x), by the asymptotic series where Φ(x) is too small for a float."""
    if x > -30:
        return math.log(normal_below(x))
    series = 1 - 1 / x**2 + 3 / x**4
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
