"""What a finished run replays of each class, beside real held-out examples, in one evaluation space for all methods.

The extractor φ is the base encoder as the shared warm-up left it: it has seen no label, is the same for every method,
for the clean and the weak runs of a seed, and no method can bend it. Replayed inputs are embedded by φ like real ones.

Features that a method replays in its own space (before or after the adapter) cannot be put through φ. They are carried
over by one affine map, fitted by ridge regression on real training examples from the run's final features to φ's. The
real side goes through the same map, so a memory that draws from the true features has no gap, whatever the fit; `fit`
is the share of φ's variance on held-out examples that the map explains, and says how much of φ's space is seen.

The kernel's bandwidth is the median distance between the real φ features of the class: one for all methods.
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
from profcil.engine.loop import RunState
from profcil.engine.world import World
from profcil.methods.base import Method, Samples
from profcil.model.net import Weights
from profcil.randomness import generator, torch_generator

COUNT = 100  # samples a class and side, where the held-out part has as many
FITTED = 5000  # training examples behind the map into φ's space
RIDGE = 1e-3  # per example, on standardised features
EXTRACTOR = "base encoder after the shared warm-up, without adapter"


@dataclass(frozen=True)
class Pair:
    """Equally many real and replayed features of one class."""

    label: int
    real: Tensor
    replay: Tensor
    bandwidth: float


class Eye:
    """The evaluation space of one run."""

    def __init__(self, world: World, method: Method, state: RunState, warm: Weights) -> None:
        self.world, self.method, self.state, self.warm = world, method, state, warm
        self.maps: dict[str, tuple[Map, Tensor]] = {}
        self.judged = self.phi(torch.arange(len(world.judged), device=world.device))

    def phi(self, index: Tensor) -> Tensor:
        return embed(self.world.net, self.warm["base"], self.world.judged, index)

    def pairs(self) -> Iterator[Pair]:
        """Every class of which something is replayed, in the order of the tasks."""
        for label in (y for task in self.world.plan.tasks for y in task):
            rows = self.held_out(label)
            samples = self.draw(label, len(rows)) if len(rows) > 1 else None
            if samples is None:
                continue
            replay, real = self.place(samples, rows)
            n = min(len(replay), len(rows))
            if n > 1:
                yield Pair(label, real[:n], replay[:n], median_bandwidth(self.judged[rows]))

    def held_out(self, label: int) -> Tensor:
        """The same real examples of a class for every method, in a random order."""
        ids = torch.nonzero(self.world.judged.y == label).flatten().cpu()
        order = generator(self.world.config.seed, "replay-gap", "real", label).permutation(len(ids))
        return ids[torch.from_numpy(order)[:COUNT]].to(self.world.device)

    def draw(self, label: int, count: int) -> Samples | None:
        """What the final state replays; clients come with what they have kept."""
        world, state = self.world, self.state
        rounds = world.config.train.rounds
        when = When("round", world.plan.positions - 1, rounds - 1, rounds)
        clients = [world.client(c, when, own) for c, own in sorted(state.private.items())]
        world.net.load(state.server.weights())
        world.net.eval()
        rng = torch_generator(world.config.seed, "replay-gap", "replay", label, device=world.device)
        with torch.no_grad():
            return self.method.replay(world.net, state.server, clients, label, count, rng)

    @torch.no_grad()
    def place(self, samples: Samples, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Replayed and real features in the evaluation space."""
        net = self.world.net
        if samples.space == "inputs":
            net.load({"base": self.warm["base"]})
            net.eval()
            return net.base(*samples.tensors), self.judged[rows]
        if samples.space not in self.maps:
            self.maps[samples.space] = self.fitted(samples.space)
        carry, own = self.maps[samples.space]
        return carry(samples.tensors[0]), carry(own[rows])

    def fitted(self, space: str) -> tuple[Map, Tensor]:
        """The map from the run's final features into φ's space, and the held-out features it starts from."""
        world, train = self.world, self.world.bundle.train
        drawn = generator(world.config.seed, "replay-gap", "map").permutation(len(train))[:FITTED]
        index = torch.from_numpy(np.sort(drawn)).to(world.device)
        start = self.own(space, train, index)
        goal = embed(world.net, self.warm["base"], train, index)
        return Map(start, goal), self.own(space, world.judged, torch.arange(len(world.judged), device=world.device))

    def own(self, space: str, examples: Any, index: Tensor) -> Tensor:
        """Features under the run's final model, before or after the adapter."""
        weights = self.state.server.weights()
        u = embed(self.world.net, weights["base"], examples, index)
        self.world.net.load(weights)
        return u if space == "base" else self.world.net.tail.adapt(u)

    def fit(self) -> dict[str, float]:
        """How much of φ's variance on held-out examples each map explains."""
        return {space: explained(carry(own), self.judged) for space, (carry, own) in self.maps.items()}


class Map:
    """An affine map by ridge regression on standardised features."""

    def __init__(self, start: Tensor, goal: Tensor) -> None:
        x, y = start.double(), goal.double()
        self.mean, self.std, self.shift = x.mean(0), x.std(0).clamp(min=1e-6), y.mean(0)
        a = (x - self.mean) / self.std
        gram = a.T @ a + RIDGE * len(a) * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        self.weight = torch.linalg.solve(gram, a.T @ (y - self.shift))

    def __call__(self, u: Tensor) -> Tensor:
        return (((u.double() - self.mean) / self.std) @ self.weight + self.shift).float()


def explained(found: Tensor, truth: Tensor) -> float:
    """R²: one less the squared error over the variance around the mean."""
    error, spread = (found - truth).double().square().sum(), (truth - truth.mean(0)).double().square().sum()
    return float(1 - error / spread.clamp(min=1e-12))


def examine(eye: Eye) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The gap per class and per task, and the features behind it; None where a method replays nothing."""
    pairs = list(eye.pairs())
    if not pairs:
        return None
    seed = eye.world.config.seed
    gaps = {p.label: replay_gap(p.real, p.replay, seed, p.bandwidth) for p in pairs}
    report = {
        "extractor": EXTRACTOR,
        "fit": eye.fit(),
        "classes": {str(label): gap for label, gap in gaps.items()},
        "tasks": {
            str(t): mean_gap([gaps[y] for y in task if y in gaps]) for t, task in enumerate(eye.world.plan.tasks)
        },
    }
    arrays = {
        "real": torch.cat([p.real for p in pairs]).float().cpu().numpy(),
        "replay": torch.cat([p.replay for p in pairs]).float().cpu().numpy(),
        "real_label": np.repeat([p.label for p in pairs], [len(p.real) for p in pairs]),
        "replay_label": np.repeat([p.label for p in pairs], [len(p.replay) for p in pairs]),
    }
    return report, arrays


def mean_gap(gaps: list[dict[str, float]]) -> dict[str, float] | None:
    """A task's gap: the mean over its replayed classes."""
    names = ("mmd2", "w1", "cosine")
    return {k: fmean(g[k] for g in gaps) for k in names} | {"classes": len(gaps)} if gaps else None
