"""Features by replay: those that the model gives one batch after another, under its present weights."""

from __future__ import annotations

import copy

import pytest
import torch
from recorders import EagerRecorder

from profcil.accel.cuda_graphs import recorded_features
from profcil.accel.cuda_graphs.recorded_features import RecordedFeatures
from profcil.engine.client import embed
from profcil.errors import Failure


class Counting(EagerRecorder):
    made = 0

    def record(self, step, rows, warm=None):
        self.made += 1
        return super().record(step, rows, warm)


def test_features_by_replaying_are_the_model_s_own(fresh, monkeypatch):
    monkeypatch.setattr(recorded_features, "PIECES", (32, 8))
    world = fresh("fedavg").world
    net, base = world.net, world.net.weights()["base"]
    other, index = {k: v * 1.1 for k, v in base.items()}, torch.arange(75)
    plain = [embed(net, weights, world.evaluation_examples, index) for weights in (base, other)]
    recorder = Counting()
    net.recorded_features = RecordedFeatures(recorder)
    for weights, right in zip((base, other), plain, strict=True):
        torch.testing.assert_close(embed(net, weights, world.evaluation_examples, index), right)
        torch.testing.assert_close(embed(net, weights, world.evaluation_examples, index[40:43]), right[40:43])
    assert recorder.made == 2 and not torch.equal(*plain)
    embed(net, base, world.bundle.train, index + 200)  # of more examples than are compared
    embed(net, base, world.evaluation_examples, index)
    assert recorder.made == 4
    assert copy.deepcopy(net).recorded_features is None
    net.recorded_features = None


class Refusing(EagerRecorder):
    def record(self, step, rows, warm=None):
        raise RuntimeError("a number was read back")


def test_an_encoder_that_cannot_be_recorded_says_what_to_do(fresh):
    world = fresh("fedavg").world
    world.net.recorded_features = RecordedFeatures(Refusing())
    with pytest.raises(
        Failure, match=r"recorded as a CUDA graph \(a number was read back\); run with --set accelerate=off"
    ):
        embed(world.net, world.net.weights()["base"], world.evaluation_examples, torch.arange(3))
    world.net.recorded_features = None


def test_pieces_cover_all_and_only_the_last_is_filled_up():
    assert list(recorded_features.pieces(625)) == [(0, 512, 512), (512, 625, 128)]
    assert list(recorded_features.pieces(700)) == [(0, 512, 512), (512, 640, 128), (640, 700, 128)]
    assert list(recorded_features.pieces(3)) == [(0, 3, 128)] and not list(recorded_features.pieces(0))
