"""FAA, CTA and AF as pure functions of one accuracy matrix and the clients' task orders.

There is one global model, so accuracy per (position, task) is measured once; what differs between clients is only
which cells of that matrix belong to their history. All values are fractions in [0, 1].
"""

from __future__ import annotations

import numpy as np


def accuracy(correct: np.ndarray, total: np.ndarray) -> np.ndarray:
    """[positions, tasks]; NaN where a task was not evaluated (not introduced yet, or without test examples)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((correct >= 0) & (total > 0), correct / np.maximum(total, 1), np.nan)


def cumulative_accuracy(correct: np.ndarray, total: np.ndarray, orders: np.ndarray, position: int) -> np.ndarray:
    """A_c^(p): each client's accuracy over the pooled test examples of the tasks it has met, [clients]."""
    met = orders[:, : position + 1]
    shares: np.ndarray = correct[position][met].sum(1) / total[met].sum(1)
    return shares


def final_average_accuracy(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    return float(cumulative_accuracy(correct, total, orders, len(correct) - 1).mean())


def current_task_accuracy(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    """Mean over clients and positions of the accuracy on the task the client meets there."""
    return float(current_by_position(correct, total, orders).mean())


def current_by_position(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """CTA at each position, averaged over clients, [positions]."""
    positions = np.arange(orders.shape[1])
    means: np.ndarray = accuracy(correct, total)[positions[None, :], orders].mean(0)
    return means


def forgetting(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """F_{c,t}: the best accuracy since the client first met the task, less the final one; [clients, tasks]."""
    a = accuracy(correct, total)
    first = np.argsort(orders, axis=1)  # p_c(t)
    best = np.fmax.accumulate(a[::-1], axis=0)[::-1]  # best from a position on
    lost: np.ndarray = best[first, np.arange(a.shape[1])[None, :]] - a[-1][None, :]
    return lost


def average_forgetting(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    """Mean forgetting over clients, each client's last task left out; 0 where there is only one task."""
    clients, tasks = orders.shape
    if tasks == 1:
        return 0.0
    f = forgetting(correct, total, orders)
    keep = np.ones_like(f, dtype=bool)
    keep[np.arange(clients), orders[:, -1]] = False
    return float(f[keep].reshape(clients, tasks - 1).mean())


def summary(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> dict[str, float]:
    """The three headline metrics, in percent."""
    return {
        "faa": 100 * final_average_accuracy(correct, total, orders),
        "cta": 100 * current_task_accuracy(correct, total, orders),
        "af": 100 * average_forgetting(correct, total, orders),
    }
