"""The data-free generator: image shapes, BatchNorm statistics, and the terms of its losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from profcil.engine.channel import Block, ServerState
from profcil.methods.parts.generator import (
    BatchNormStatistics,
    apply_gradients,
    as_bytes,
    blur_kernel,
    gaussian_divergence,
    imbalance,
    is_outdated,
    make_generator,
    moment_distance,
    roughness,
)
from profcil.model.layers import BatchNorm
from profcil.model.net import MODEL


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def like(*shape: int) -> tuple[torch.Tensor]:
    return (torch.zeros(0, *shape, dtype=torch.uint8),)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 64), (1, 28, 28), (2, 5, 7), (3, 17, 30)])
def test_images_have_the_shape_of_the_data(shape):
    x = make_generator(6, like(*shape), 4, rng())(torch.randn(3, 6, generator=rng())).detach()
    assert x.shape == (3, *shape)
    assert 0 <= float(x.min()) < float(x.max()) <= 1


@pytest.mark.parametrize(("latent", "millions"), [(256, 2.33), (1000, 8.42)])
def test_parameter_counts_are_the_published_ones(latent, millions):
    count = sum(p.numel() for p in make_generator(latent, like(3, 32, 32), 0, rng()).parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


def test_an_image_does_not_depend_on_the_rest_of_its_batch():
    generator = make_generator(6, like(1, 8, 8), 4, rng())
    generator.train()
    generator(torch.randn(64, 6, generator=rng(1)))
    z = generator.eval().noise(5, rng(2))
    together = generator.images(z)
    apart = torch.cat([generator.images(piece) for piece in z.split(2)])
    assert together.dtype == torch.uint8 and together.shape == (5, 1, 8, 8)
    assert torch.equal(together, apart)
    assert not torch.equal(together, generator.images(generator.noise(5, rng(3))))


def test_weights_depend_on_the_given_random_generator_only():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two, other = (make_generator(6, like(1, 8, 8), 4, rng(s)) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.first.weight, two.first.weight)
    assert not torch.equal(one.first.weight, other.first.weight)


def test_bytes_are_rounded():
    assert as_bytes(torch.tensor([0.0, 0.499 / 255, 0.501 / 255, 1.0])).tolist() == [0, 0, 1, 255]


def test_statistics_are_those_of_the_inputs_of_each_layer():
    base = nn.Sequential(nn.Conv2d(1, 3, 1), BatchNorm(3), nn.Conv2d(3, 2, 1), BatchNorm(2))
    x = torch.randn(50, 1, 4, 4, generator=rng())
    for layer in base:
        if isinstance(layer, BatchNorm):
            layer.momentum = 1.0  # the running statistics become those of one batch
    base.requires_grad_(False).train()
    base(x)
    base.eval()
    with BatchNormStatistics(base) as seen:
        base(x)
        assert seen.layer_mask.tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
        torch.testing.assert_close(seen.batch[0][:3], base[0](x).mean((0, 2, 3)))
        torch.testing.assert_close(seen.batch[1][3:], base[:3](x).var((0, 2, 3), correction=0))
        measures = (moment_distance, gaussian_divergence)
        own = [float(measure(seen.batch, seen.running, seen.layer_mask)) for measure in measures]
        base(3 * x + 1)
        other = [float(measure(seen.batch, seen.running, seen.layer_mask)) for measure in measures]
    assert max(own) < 0.05 < 0.2 < min(other)
    recorded = dict(seen.recorded)
    base(x)
    assert recorded == seen.recorded  # nothing is recorded outside the context


def test_the_distance_is_a_sum_of_norms_over_layers():
    batch = torch.tensor([3.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 4.0])
    running = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])
    layer_mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert float(moment_distance(batch, running, layer_mask)) == pytest.approx(5 + 3, abs=1e-4)


def test_the_gradient_of_the_distance_is_finite_at_zero():
    moments = torch.ones(3, requires_grad=True), torch.ones(3)
    distance = moment_distance(moments, (torch.ones(3), torch.ones(3)), torch.ones(1, 3))
    (gradient,) = torch.autograd.grad(distance, moments[0])
    assert gradient.tolist() == [0, 0, 0]


def test_the_divergence_is_that_of_gaussians_averaged_by_layer():
    batch = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([2.0, 0.5, 1.0])
    running = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 3.0, 2.0])
    each = kl_divergence(*(Normal(mean, var.sqrt()) for mean, var in (running, batch)))
    layer_mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(gaussian_divergence(batch, running, layer_mask), ((each[0] + each[1]) / 2 + each[2]) / 2)


def test_imbalance_is_zero_for_equally_frequent_classes_and_one_for_a_single_class():
    assert float(imbalance(torch.zeros(4, 3))) == pytest.approx(0, abs=1e-6)
    assert float(imbalance(100 * torch.eye(3))) == pytest.approx(0, abs=1e-4)  # confident predictions, equally often
    assert float(imbalance(100 * torch.eye(3)[[0, 0, 0]])) == pytest.approx(1, abs=1e-4)
    two = float(imbalance(torch.tensor([[0.0, 0.0, -100.0]])))
    assert two == pytest.approx(1 - math.log(2) / math.log(3), abs=1e-4)
    assert float(imbalance(torch.zeros(4, 1))) == 0


def test_roughness_depends_on_pixel_noise_and_not_on_brightness():
    kernel = blur_kernel(2, torch.device("cpu"))
    flat = torch.full((3, 2, 8, 8), 0.7)
    noise = torch.rand(3, 2, 8, 8, generator=rng())
    ramp = torch.linspace(0, 1, 8).expand(3, 2, 8, 8)
    assert float(roughness(flat, kernel)) < 1e-12
    assert float(roughness(ramp, kernel)) < 0.1 * float(roughness(noise, kernel))


def test_a_step_leaves_no_gradients_on_the_parameters():
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    apply_gradients(torch.optim.SGD([p], 0.5), [p], [torch.tensor([1.0, -1.0])])
    assert p.tolist() == [0.5, 2.5] and p.grad is None


def test_a_block_computed_from_a_model_is_outdated_once_the_model_changes():
    state = ServerState().put_weights({b: {"w": torch.zeros(1)} for b in MODEL})
    assert is_outdated(state, "pool")
    state = state.put(pool=Block("replay", {}))
    assert not is_outdated(state, "pool")
    assert is_outdated(state.put(head=Block("model", {"w": torch.ones(1)})), "pool")
