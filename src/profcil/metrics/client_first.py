"""FAA, CTA and AF as pure functions of one accuracy matrix and the clients' task orders.

There is one global model, so the accuracy per (position, task) is measured once. Clients differ only in which cells of
that matrix belong to their history. All values but those of `summary` are fractions in [0, 1].
"""

from __future__ import annotations

import numpy as np


def accuracy(correct: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The accuracy [positions, tasks]; NaN for a task that is not introduced yet or has no test examples."""
    is_evaluated = (correct >= 0) & (total > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = correct / np.maximum(total, 1)
        return np.where(is_evaluated, shares, np.nan)


def cumulative_accuracy(correct: np.ndarray, total: np.ndarray, orders: np.ndarray, position: int) -> np.ndarray:
    """A_c^(p): each client's accuracy over the pooled test examples of its tasks so far, [clients]."""
    tasks = orders[:, : position + 1]
    pooled: np.ndarray = correct[position][tasks].sum(1) / total[tasks].sum(1)
    return pooled


def final_average_accuracy(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    """FAA: the mean over clients of the cumulative accuracy after the last position."""
    last = len(correct) - 1
    accuracies = cumulative_accuracy(correct, total, orders, last)
    return float(accuracies.mean())


def current_task_accuracy(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    """CTA: the mean over clients and positions of the accuracy on the client's current task."""
    return float(current_by_position(correct, total, orders).mean())


def current_by_position(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """CTA at each position, averaged over clients, [positions]."""
    positions = np.arange(orders.shape[1])
    matrix = accuracy(correct, total)
    current = matrix[positions[None, :], orders]
    means: np.ndarray = current.mean(0)
    return means


def best_from_each(matrix: np.ndarray) -> np.ndarray:
    """The best accuracy of every task at each position or any later one, [positions, tasks]."""
    best: np.ndarray = np.fmax.accumulate(matrix[::-1], axis=0)[::-1]
    return best


def forgetting(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """F_{c,t} [clients, tasks]: the best accuracy since the client had the task, minus the final accuracy."""
    matrix = accuracy(correct, total)
    position_of = np.argsort(orders, axis=1)  # p_c(t)
    best_from = best_from_each(matrix)
    tasks = np.arange(matrix.shape[1])
    best = best_from[position_of, tasks[None, :]]
    final = matrix[-1]
    drop: np.ndarray = best - final[None, :]
    return drop


def average_forgetting(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    """AF: the mean forgetting over clients, without each client's last task; 0 if there is only one task."""
    clients, tasks = orders.shape
    if tasks == 1:
        return 0.0
    drop = forgetting(correct, total, orders)
    included = np.ones_like(drop, dtype=bool)
    included[np.arange(clients), orders[:, -1]] = False
    drop = drop[included].reshape(clients, tasks - 1)
    return float(drop.mean())


def summary_so_far(correct: np.ndarray, total: np.ndarray, orders: np.ndarray, position: int) -> dict[str, float]:
    """FAA, CTA and AF in percent as if the stream had ended after `position`; after the last one those of the run."""
    count = position + 1
    matrix = accuracy(correct[:count], total)
    positions = np.arange(count)
    current = matrix[positions[None, :], orders[:, :count]]
    best_from = best_from_each(matrix)
    met_before = orders[:, :position]
    drop = best_from[positions[None, :position], met_before] - matrix[position][met_before]
    with np.errstate(invalid="ignore"):  # a client whose tasks have no test examples has no accuracy
        by_client = cumulative_accuracy(correct, total, orders, position)
    return {
        "faa": 100 * float(by_client.mean()),
        "cta": 100 * float(current.mean()),
        "af": 100 * float(drop.mean()) if position else 0.0,
    }


def summary(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> dict[str, float]:
    """FAA, CTA and AF in percent."""
    faa = final_average_accuracy(correct, total, orders)
    cta = current_task_accuracy(correct, total, orders)
    af = average_forgetting(correct, total, orders)
    return {"faa": 100 * faa, "cta": 100 * cta, "af": 100 * af}
