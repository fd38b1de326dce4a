"""The replay of a finished run against real held-out examples, in one evaluation space for all methods.

The extractor φ is the base encoder after the shared warm-up. It was trained without labels and is the same for every
method and for the clean and weak runs of a seed. Replayed inputs are embedded by φ like real ones.

Features that a method replays in its own space (before or after the adapter) cannot be embedded by φ. They are mapped
by one affine map from the run's final features to φ's features, fitted by ridge regression on real training examples.
The real side goes through the same map, so a memory that draws from the true features has no gap, even if the fit is
poor. `fit` is the share of φ's variance on held-out examples that the map explains.

The kernel's bandwidth is the median distance between the real φ features of the class, the same for all methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.diagnostics.replay_gap import median_bandwidth, replay_gap
from profcil.engine.channel import When
from profcil.engine.client import embed
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.methods.base import Method, Samples
from profcil.model.net import Weights
from profcil.randomness import generator, torch_generator

COUNT = 100  # samples per class and side, if the held-out part has as many
MAP_EXAMPLES = 5000  # training examples that the affine map is fitted on
RIDGE = 1e-3  # per example, on standardised features
EXTRACTOR = "base encoder after the shared warm-up, without adapter"


@dataclass(frozen=True)
class Pair:
    """Equally many real and replayed features of one class."""

    label: int
    real: Tensor
    replay: Tensor
    bandwidth: float


class EvaluationSpace:
    """The space of the extractor φ, with the real and the replayed features of one run."""

    def __init__(self, world: World, method: Method, state: RunState, warm: Weights) -> None:
        self.world = world
        self.method = method
        self.state = state
        self.warm = warm
        self.maps: dict[str, tuple[AffineMap, Tensor]] = {}  # by space: the map and the held-out features it maps
        self.judged = embed(world.net, warm["base"], world.evaluation_examples, self.all_rows())

    def all_rows(self) -> Tensor:
        """The row numbers of all held-out examples."""
        count = len(self.world.evaluation_examples)
        return torch.arange(count, device=self.world.device)

    def pairs(self) -> Iterator[Pair]:
        """A pair for every class that the method replays, in the order of the tasks."""
        labels = [y for task in self.world.plan.tasks for y in task]
        for label in labels:
            rows = self.held_out(label)
            if len(rows) < 2:
                continue
            samples = self.draw_replay(label, len(rows))
            if samples is None:
                continue
            replay, real = self.project(samples, rows)
            n = min(len(replay), len(rows))
            if n > 1:
                bandwidth = median_bandwidth(self.judged[rows])
                yield Pair(label, real[:n], replay[:n], bandwidth)

    def held_out(self, label: int) -> Tensor:
        """The rows of real examples of a class in random order, the same for every method."""
        is_class = self.world.evaluation_examples.y == label
        ids = torch.nonzero(is_class).flatten().cpu()
        rng = generator(self.world.config.seed, "replay-gap", "real", label)
        order = torch.from_numpy(rng.permutation(len(ids)))
        drawn = ids[order[:COUNT]]
        return drawn.to(self.world.device)

    def draw_replay(self, label: int, count: int) -> Samples | None:
        """Samples of a class, replayed from the final server state and the private states of the clients."""
        world = self.world
        state = self.state
        rounds = world.config.train.rounds
        last_position = world.plan.positions - 1
        last_round = When("round", last_position, rounds - 1, rounds)
        privates = sorted(state.private.items())
        clients = [world.client(c, last_round, private) for c, private in privates]
        world.net.load(state.server.weights())
        world.net.eval()
        rng = torch_generator(world.config.seed, "replay-gap", "replay", label, device=world.device)
        with torch.no_grad():
            return self.method.replay(world.net, state.server, clients, label, count, rng)

    @torch.no_grad()
    def project(self, samples: Samples, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Replayed samples and real held-out rows as features in the evaluation space."""
        net = self.world.net
        if samples.space == "inputs":
            net.load({"base": self.warm["base"]})
            net.eval()
            return net.base(*samples.tensors), self.judged[rows]
        if samples.space not in self.maps:
            self.maps[samples.space] = self.fit_map(samples.space)
        to_phi, held_out = self.maps[samples.space]
        return to_phi(samples.tensors[0]), to_phi(held_out[rows])

    def fit_map(self, space: str) -> tuple[AffineMap, Tensor]:
        """The map from the run's final features to φ's, and the final features of all held-out examples."""
        world = self.world
        train = world.bundle.train
        rng = generator(world.config.seed, "replay-gap", "map")
        drawn = rng.permutation(len(train))[:MAP_EXAMPLES]
        rows = torch.from_numpy(np.sort(drawn))
        index = rows.to(world.device)
        source = self.final_features(space, train, index)
        target = embed(world.net, self.warm["base"], train, index)
        held_out = self.final_features(space, world.evaluation_examples, self.all_rows())
        return AffineMap(source, target), held_out

    def final_features(self, space: str, examples: Any, index: Tensor) -> Tensor:
        """Features under the run's final model, before or after the adapter."""
        weights = self.state.server.weights()
        u = embed(self.world.net, weights["base"], examples, index)
        self.world.net.load(weights)
        return u if space == "base" else self.world.net.tail.adapt(u)

    def map_quality(self) -> dict[str, float]:
        """The share of φ's variance on held-out examples that each map explains."""
        quality = {}
        for space, (to_phi, u) in self.maps.items():
            quality[space] = explained_variance(to_phi(u), self.judged)
        return quality


class AffineMap:
    """An affine map, fitted by ridge regression on standardised features."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        x = source.double()
        y = target.double()
        self.mean = x.mean(0)
        self.std = x.std(0).clamp(min=1e-6)
        self.shift = y.mean(0)
        a = (x - self.mean) / self.std
        width = a.shape[1]
        identity = torch.eye(width, dtype=a.dtype, device=a.device)
        penalty = RIDGE * len(a) * identity
        gram = a.T @ a + penalty
        centred = y - self.shift
        self.weight = torch.linalg.solve(gram, a.T @ centred)

    def __call__(self, u: Tensor) -> Tensor:
        standardised = (u.double() - self.mean) / self.std
        mapped = standardised @ self.weight + self.shift
        return mapped.float()


def explained_variance(predicted: Tensor, truth: Tensor) -> float:
    """R²: 1 minus the squared error over the variance around the mean."""
    error = _sum_of_squares(predicted - truth)
    variance = _sum_of_squares(truth - truth.mean(0))
    unexplained = error / variance.clamp(min=1e-12)
    return float(1 - unexplained)


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.double().square().sum()


def measure_replay(space: EvaluationSpace) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The gap per class and per task, and the features it was computed from; None if the method replays nothing."""
    pairs = list(space.pairs())
    if not pairs:
        return None
    seed = space.world.config.seed
    gaps = {p.label: replay_gap(p.real, p.replay, seed, p.bandwidth) for p in pairs}
    tasks = {}
    for t, task in enumerate(space.world.plan.tasks):
        of_task = [gaps[y] for y in task if y in gaps]
        tasks[str(t)] = mean_gap(of_task)
    classes = {str(label): gap for label, gap in gaps.items()}
    report = {"extractor": EXTRACTOR, "fit": space.map_quality(), "classes": classes, "tasks": tasks}
    return report, feature_arrays(pairs)


def feature_arrays(pairs: list[Pair]) -> dict[str, np.ndarray]:
    """The features of all pairs as plain arrays, with their labels."""
    labels = [p.label for p in pairs]
    arrays: dict[str, np.ndarray] = {}
    real = [p.real for p in pairs]
    replay = [p.replay for p in pairs]
    by_name = {"real": real, "replay": replay}
    for name, features in by_name.items():
        joined = torch.cat(features)
        arrays[name] = joined.float().cpu().numpy()
    for name, features in by_name.items():
        counts = [len(f) for f in features]
        arrays[f"{name}_label"] = np.repeat(labels, counts)
    return arrays


def mean_gap(gaps: list[dict[str, float]]) -> dict[str, float] | None:
    """The gap of a task: the mean over its replayed classes; None if there are none."""
    if not gaps:
        return None
    mean: dict[str, float] = {}
    for name in ("mmd2", "w1", "cosine"):
        mean[name] = fmean(gap[name] for gap in gaps)
    return mean | {"classes": len(gaps)}
