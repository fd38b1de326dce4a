"""What a server trains, recorded and eagerly: generators against a frozen ResNet-18."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profcil import registry
from profcil.accel import resnet
from profcil.bench.steps import world_for
from profcil.engine.channel import When
from profcil.engine.server import unchanged
from profcil.methods.parts.distillation import teacher_logits
from profcil.methods.parts.generator import BatchNormStatistics, generate_images, load_frozen
from profcil.methods.parts.synthesis import Synthesis

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (64, 512, 4, 4)], ids=str)
def test_moments_and_their_gradients_are_those_of_torch(shape):
    rng, results = torch.Generator("cuda").manual_seed(0), []
    x = (torch.randn(shape, generator=rng, device="cuda") * 2 + 1).to(torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    known = torch.rand(shape[1], generator=rng, device="cuda")
    assert resnet.fits(x)
    for mean, var in (resnet.moments(x), torch.var_mean(x.float(), (0, 2, 3), correction=0)[::-1]):
        results.append([mean, var, *torch.autograd.grad((mean * known).sum() + (var - known).square().sum(), x)])
    for a, b in zip(*results, strict=True):
        assert float((a.float() - b.float()).abs().max() / b.float().abs().max()) < 1e-2


def test_recorded_steps_make_the_images_of_eager_ones():
    world = world_for("target", "cuda")
    params = replace(world.config.params, pool=4, synthesis_rounds=1, synthesis_steps=4, student_steps=4)
    recorded, made = world.server(When("round", 0, 0, 1)), []
    assert recorded.repeated is not unchanged
    for server in (recorded, replace(recorded, repeated=resnet.recorded())):  # by the same kernels
        teacher = load_frozen(world.net, world.net.weights())
        images, answers, _ = Synthesis(params, server, teacher, server.seen).pool()
        made.append((images.float(), answers))
    (images, answers), (right, _) = made
    assert float((images - right).abs().mean()) < 1 < float(right.std())  # of 255
    torch.testing.assert_close(answers, teacher_logits(world.net, images.to(torch.uint8)), rtol=0.05, atol=0.05)


def test_recorded_steps_train_the_generator_as_eager_ones_do():
    world = world_for("mfcl", "cuda")
    method = registry.find("methods", "mfcl").METHOD(replace(world.config.params, iterations=6))
    state = method.begin(world.net.weights((*world.net.weights(), "generator")))
    known = replace(state.blocks["trained_classes"], labels=tuple(range(world.net.classes)))
    state = state.put(head=state.blocks["head"], trained_classes=known)  # a newer head than the generator knows
    server = world.server(When("round", 0, 0, 1))
    trained = [
        method.train_server(s, state).blocks["generator"].tensors for s in (server, replace(server, repeated=unchanged))
    ]
    before = state.blocks["generator"].tensors
    for name in ("first.weight", "conv1.weight", "out.weight"):
        one, other = (t[name] - before[name] for t in trained)
        assert float((one - other).norm() / other.norm()) < 0.1


def test_features_by_replay_are_those_of_the_model():
    world = world_for("mfcl", "cuda")
    net = load_frozen(world.net, world.net.weights((*world.net.weights(), "generator")))
    generator, rng = net.get_submodule("generator"), torch.Generator("cuda").manual_seed(0)
    results = []
    for replay in (net.recorded_features, None):
        net.recorded_features = replay
        x = generate_images(net, generator, 700, rng.manual_seed(0))
        results.append((x, teacher_logits(net, x)))
    assert x.dtype == torch.uint8 and float((results[0][0].float() - results[1][0].float()).abs().max()) <= 2
    torch.testing.assert_close(teacher_logits(net, results[0][0]), results[0][1], rtol=0.05, atol=0.05)
    with BatchNormStatistics(net.base) as statistics, torch.autocast("cuda", torch.bfloat16):
        net(results[0][0])
    assert all(torch.isfinite(m).all() for m in statistics.batch)
