"""The probes against scikit-learn, and the alignment on examples with a known result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler

from profcil.diagnostics.probe import nearest_mean_accuracy, ridge_accuracy
from profcil.metrics.alignment import alignment, centred_alignment, compare_means, oracle_means


@pytest.fixture
def blobs() -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 6))
    y = np.repeat(np.arange(4), 40)
    x = centres[y] + 1.2 * rng.normal(size=(160, 6))
    order = rng.permutation(160)
    x = torch.tensor(x[order]).float()
    y = torch.tensor(y[order])
    return x[:100], y[:100], x[100:], y[100:]


def test_the_ridge_probe_is_ridge_regression_on_standardised_features(blobs):
    train, y, test, truth = blobs
    scale = StandardScaler().fit(train.numpy())
    target = np.eye(4)[y.numpy()]
    # our probe also shrinks the bias by 0.1 percent, which does not change the predictions
    model = Ridge(alpha=1e-3 * len(y)).fit(scale.transform(train.numpy()), target)
    predicted = model.predict(scale.transform(test.numpy())).argmax(1)
    assert ridge_accuracy(train, y, test, truth, 4) == pytest.approx((predicted == truth.numpy()).mean(), abs=0.02)


def test_the_nearest_mean_probe_is_nearest_centroid(blobs):
    train, y, test, truth = blobs
    expected = NearestCentroid().fit(train.numpy(), y.numpy()).score(test.numpy(), truth.numpy())
    assert nearest_mean_accuracy(train, y, test, truth) == pytest.approx(expected)


def test_the_probe_of_noise_is_at_chance_level():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(800, 5, generator=g)
    y = torch.arange(800) % 4
    assert ridge_accuracy(x[:400], y[:400], x[400:], y[400:], 4) < 0.4


def test_alignment_is_one_for_the_true_means_and_minus_one_for_their_negatives():
    means = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert alignment(3 * means, means) == pytest.approx(1.0)
    assert alignment(-means, means) == pytest.approx(-1.0)


def test_a_common_mean_raises_plain_alignment_but_not_the_centred_one():
    """The memories of two classes are swapped, far from the origin."""
    common = torch.tensor([100.0, 100.0])
    truth = common + torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    swapped = truth.flip(0)
    assert alignment(swapped, truth) > 0.999
    assert centred_alignment(swapped, truth, common) == pytest.approx(-1.0)


def test_means_are_per_class_in_the_order_of_the_labels():
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    y = torch.tensor([7, 7, 2])
    assert torch.equal(oracle_means(features, y, (2, 7)), torch.tensor([[0.0, 5.0], [2.0, 0.0]]))
    found = compare_means(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), features, y, (2, 7))
    assert found["align"] == pytest.approx(1.0) and found["classes"] == 2
