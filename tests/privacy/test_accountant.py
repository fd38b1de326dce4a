"""ε and δ of Gaussian noise."""

from __future__ import annotations

import math

import pytest

from profcil.privacy.accountant import delta_of, epsilon_of, multiplier_of

# (z, δ, releases, ε), by get_epsilon_gaussian(z / √releases, δ) of dp-accounting 0.6.0
KNOWN = [
    (1.0, 1e-5, 1, 4.377178095681137),
    (0.5, 1e-5, 1, 9.997256146434315),
    (4.0, 1e-5, 10, 3.3414094692392506),
    (2.0, 1e-6, 50, 22.424515827391897),
    (20.0, 1e-5, 1, 0.16004203445813098),
    (0.05, 1e-5, 1, 284.39184949774256),
]
SIGMAS = [(0.5, 7.0318266755825), (1, 3.7306316348159374), (2, 1.993812445643537), (8, 0.6002290721989517)]


@pytest.mark.parametrize(("z", "delta", "releases", "epsilon"), KNOWN)
def test_epsilon_is_that_of_the_library(z, delta, releases, epsilon):
    assert epsilon_of(math.sqrt(releases) / z, delta) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "sigma"), SIGMAS)
def test_the_noise_is_that_of_the_library(epsilon, sigma):
    """By get_sigma_gaussian(ε, 1e-5) of dp-accounting 0.6.0. Four releases need twice the noise."""
    assert multiplier_of(epsilon, 1e-5) == pytest.approx(sigma, rel=1e-9)
    assert multiplier_of(epsilon, 1e-5, 4) == pytest.approx(2 * sigma, rel=1e-9)


def test_calibrated_noise_spends_the_budget_and_no_more():
    for epsilon in (0.01, 0.5, 8.0, 60.0):
        spent = epsilon_of(1 / multiplier_of(epsilon, 1e-6), 1e-6)
        assert epsilon * (1 - 1e-6) < spent <= epsilon * (1 + 1e-9)


def test_edges():
    assert epsilon_of(0.0, 1e-5) == 0.0  # nothing was released
    assert epsilon_of(math.inf, 1e-5) == math.inf  # without noise
    assert delta_of(0.0, 2.0) == pytest.approx(math.erf(1 / math.sqrt(2)))  # the total variation of N(0, 1) and N(2, 1)
    assert delta_of(1e4, 1.0) == 0.0
