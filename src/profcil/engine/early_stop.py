"""Early stopping: rounds of a position are skipped once the validation FAA no longer improves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from profcil.engine.channel import ServerState, When
from profcil.engine.evaluation import evaluate, evaluation_features, sum_by_task, task_totals
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.metrics.client_first import cumulative_accuracy

if TYPE_CHECKING:
    from profcil.engine.run_state import RunState


def stop_early(world: World, method: Method, state: RunState, when: When) -> dict[str, float]:
    """After a round: measures the validation FAA as if the position ended here, and skips rounds once it has not
    improved for `early_stop` rounds.

    The final round is never skipped, and neither is one in which the method asks clients for statistics: without them
    it would lack the classes of this position. The model is not set back to that of the best round. Returns a fact
    for the log; nothing if early stopping is off.
    """
    patience = world.config.train.early_stop
    if not patience or when.final:
        return {}
    with torch.no_grad():
        ended = method.end_position(state.server, replace(when, round=when.rounds - 1))  # to be measured, not kept
    faa = validation_faa(world, method, ended, when.position)
    if faa > state.stopping.get("best", -1.0):
        state.stopping |= {"best": faa, "rounds_since": 0}
    else:
        state.stopping["rounds_since"] += 1
    if state.stopping["rounds_since"] >= patience:
        state.stopping["stopped"] = 1
    while state.stopping.get("stopped") and can_be_skipped(method, state, replace(when, round=state.round)):
        state.round += 1
    return {"validation_faa": 100 * faa}


def can_be_skipped(method: Method, state: RunState, when: When) -> bool:
    return not (when.final or method.surveys(when) or method.opens(state.server, when))


def validation_faa(world: World, method: Method, server: ServerState, position: int) -> float:
    """FAA so far on validation data, a fraction."""
    examples = world.bundle.validation
    assert examples is not None  # `held_out` has made it
    features = evaluation_features(world, method, server, examples=examples)
    right = evaluate(world, method, server, position, features, examples)
    correct = sum_by_task(world, right, position)
    matrix = np.full((position + 1, len(correct)), -1)
    matrix[position] = correct
    with np.errstate(invalid="ignore"):  # a client whose tasks have no validation examples has no accuracy
        by_client = cumulative_accuracy(matrix, task_totals(world, examples), world.plan.orders, position)
    return float(np.nan_to_num(np.nanmean(by_client)))
