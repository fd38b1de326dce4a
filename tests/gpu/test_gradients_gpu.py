"""Training with noise on gradients takes the same steps on a GPU as on a CPU, with the same samples and noise."""

from __future__ import annotations

import pytest
import torch

from profcil import registry
from profcil.engine.channel import When
from profcil.engine.world import make_world
from profcil.model.net import MODEL
from profcil.privacy.gradients import train_privately
from profcil.resolve import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SETTINGS = {
    "stream.clients": 4, "stream.participants": 2, "train.epochs": 2, "train.augment": False, "train.optimiser": "sgd",
    "warmup.rounds": 0, "model.norm": "group", "model.precision": "float32", "privacy.unit": "example",
    "privacy.epsilon": 4.0, "privacy.gradient_bound": 1.0, "privacy.sampling": 0.5,
}  # fmt: skip


def test_a_turn_with_noise_is_that_of_a_cpu(tmp_path):
    trained = []
    for device in ("cpu", "cuda"):
        config = resolve(None, {"dataset": "digits", "method": "fedavg", "device": device}, SETTINGS)
        world = make_world(config, tmp_path)
        method = registry.find("methods", "fedavg").METHOD(config.params)
        client = world.client(int(world.plan.active(0)[0]), When("round", 0, 0, 3))
        turn = method.turn(client, dict(method.begin(world.net.weights(MODEL)).blocks))
        done = train_privately(world.net, next(turn))
        trained.append(torch.cat([t.cpu().flatten() for block in MODEL for t in done.weights[block].values()]))
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-4)
