"""Evaluation: correct predictions per task, where a prediction is the best class among those introduced so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from profcil.engine.evaluation import class_accuracy, evaluate, evaluation_features, sum_by_task, task_totals


class Fixed:
    """A method whose class scores are given."""

    def __init__(self, scores: Tensor) -> None:
        self.given = scores

    def scores(self, net: Any, server: Any, features: Tensor) -> Tensor:
        return self.given


@pytest.fixture(scope="module")
def world(fresh) -> Any:
    return fresh("fedavg", warmup__rounds=0).world


def met(world: Any, position: int) -> set[int]:
    """The tasks that any client has met up to a position."""
    return {int(t) for order in world.plan.orders for t in order[: position + 1]}


def count(world: Any, scores: Tensor, position: int) -> np.ndarray:
    server = features = torch.empty(0)
    right = evaluate(world, Fixed(scores), server, position, features)  # type: ignore[arg-type]
    return sum_by_task(world, right, position)


def test_classes_that_are_not_introduced_do_not_compete(world):
    """The true class comes second to a class of a later task: every prediction is right."""
    y = world.evaluation_examples.y
    for position in range(world.plan.positions):
        tasks = met(world, position)
        later = [y for t, members in enumerate(world.plan.tasks) if t not in tasks for y in members]
        scores = torch.nn.functional.one_hot(y, 10).float()
        scores[:, later] = 5.0
        expected = [n if t in tasks else -1 for t, n in enumerate(task_totals(world))]
        assert count(world, scores, position).tolist() == expected
    assert met(world, 0) != set(range(world.plan.positions))  # else nothing was left out


def test_classes_of_other_introduced_tasks_do_compete(world):
    """A class of another task that has been met wins where its score is higher."""
    tasks = sorted(met(world, 1))
    assert len(tasks) > 1
    scores = torch.nn.functional.one_hot(world.evaluation_examples.y, 10).float()
    scores[:, world.plan.tasks[tasks[0]][0]] = 5.0
    found = count(world, scores, 1)
    totals = task_totals(world)
    assert (
        found[tasks[0]] == int((world.evaluation_examples.y == world.plan.tasks[tasks[0]][0]).sum()) < totals[tasks[0]]
    )
    assert all(found[t] == 0 for t in tasks[1:])


def test_correct_predictions_are_counted_for_the_task_of_the_true_class(world):
    """Random scores against one example after another."""
    scores = torch.rand(len(world.evaluation_examples), 10, generator=torch.Generator().manual_seed(0))
    scores += torch.nn.functional.one_hot(world.evaluation_examples.y, 10) * 0.5
    for position in range(world.plan.positions):
        tasks = met(world, position)
        seen = sorted(y for t in tasks for y in world.plan.tasks[t])
        expected = [0 if t in tasks else -1 for t in range(world.plan.positions)]
        for row, y in zip(scores.tolist(), world.evaluation_examples.y.tolist(), strict=True):
            if y in seen and max(seen, key=lambda label: row[label]) == y:
                expected[next(t for t, members in enumerate(world.plan.tasks) if y in members)] += 1
        found = count(world, scores, position)
        assert found.tolist() == expected
        assert (found <= task_totals(world)).all()


def test_totals_are_the_scored_examples_of_each_task(world):
    """Every scored example belongs to one task."""
    expected = [sum(int((world.evaluation_examples.y == y).sum()) for y in members) for members in world.plan.tasks]
    assert task_totals(world).tolist() == expected
    assert sum(expected) == len(world.evaluation_examples)


def test_a_stream_is_scored_after_each_position_under_the_model_of_that_moment(tiny):
    """The row of a position has the scores of the server's model at its end, computed here from logits."""
    run = tiny("pro")
    for position, server in enumerate(run.after_positions()):
        u = evaluation_features(run.world, run.method, server)
        logits = run.world.net.classify(u).detach()
        again = count(run.world, logits, position)
        assert run.state.scores.correct[position].tolist() == again.tolist()
    assert run.state.scores.correct[-1].min() >= 0


def test_the_tally_sums_what_rounds_report(fresh):
    """Replays asked for and served are sums over all rounds of the stream."""
    sums: dict[str, float] = {}

    def watch(what: str, when: Any, facts: dict) -> None:
        for name in ("replay_requested", "replay_served"):
            sums[name] = sums.get(name, 0.0) + facts.get(name, 0.0)

    run = fresh("pro").stream(watch)
    assert sums["replay_served"] > 0
    assert run.state.tally == sums


def test_accuracy_of_a_class(world):
    """Predictions are right for one class only; classes that are not introduced have no accuracy."""
    server = features = torch.empty(0)
    seen = sorted(world.plan.seen(0))
    scores = torch.zeros(len(world.evaluation_examples), 10)
    scores[:, seen[0]] = 1.0
    right = evaluate(world, Fixed(scores), server, 0, features)  # type: ignore[arg-type]
    found = class_accuracy(world, right, 0)
    assert len(seen) < 10
    assert found == [100.0 if y == seen[0] else 0.0 if y in seen else None for y in range(10)]
