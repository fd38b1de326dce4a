"""FAA, CTA, AF, transfer and the clients' own accuracy: functions of one accuracy matrix and the clients' task orders.

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
    is_known = correct[position][tasks] >= 0  # a client that joined later has idle tasks before, maybe unknown ones
    right = np.where(is_known, correct[position][tasks], 0).sum(1)
    pooled: np.ndarray = right / np.where(is_known, total[tasks], 0).sum(1)
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
    return means_of_known(current, correct[positions[None, :], orders] >= 0)


def means_of_known(current: np.ndarray, is_known: np.ndarray) -> np.ndarray:
    """The means over clients, [positions]. A cell whose task was not known at its position is left out; only clients
    that joined later have such cells."""
    if is_known.all():
        means: np.ndarray = current.mean(0)
        return means
    counts = is_known.sum(0)
    known: np.ndarray = np.where(is_known, current, 0.0).sum(0) / np.maximum(1, counts)
    return np.where(counts > 0, known, np.nan)


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
    has_grown = (correct[positions[None, :], orders[:, :count]] < 0).any()
    if has_grown:  # a client joined later, or a task was declared later
        by_client = known_values(by_client)
        current = known_values(current)
        drop = known_values(drop)
    return {
        "faa": 100 * float(by_client.mean()),
        "cta": 100 * float(current.mean()),
        "af": 100 * float(drop.mean()) if position else 0.0,
    }


def known_values(values: np.ndarray) -> np.ndarray:
    """The values that are numbers, as a list. A list without one has the value 0."""
    known: np.ndarray = values[~np.isnan(values)]
    return known if known.size else np.zeros(1)


def summary(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> dict[str, float]:
    """FAA, CTA and AF in percent."""
    faa = final_average_accuracy(correct, total, orders)
    cta = current_task_accuracy(correct, total, orders)
    af = average_forgetting(correct, total, orders)
    return {"faa": 100 * faa, "cta": 100 * cta, "af": 100 * af}


def client_accuracy(correct: np.ndarray, total: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Each client's final accuracy on its own mix of tasks, [clients].

    Tasks are weighted by the client's training examples [clients, tasks]. NaN for a client without examples of a task
    that is tested. (The accuracies whose mean is the FAA are equal after the last position: every client has then had
    all tasks.)
    """
    final = accuracy(correct, total)[-1]
    weights = np.where(np.isnan(final), 0, examples)
    with np.errstate(invalid="ignore"):
        shares: np.ndarray = weights @ np.nan_to_num(final) / weights.sum(1)
    return shares


def backward_transfer(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> float:
    """BWT: the final accuracy on a task less that at the position where the client had it, as a mean over clients and
    tasks without each client's last task; 0 if there is only one task."""
    if orders.shape[1] == 1:
        return 0.0
    matrix = accuracy(correct, total)
    earlier = orders[:, :-1]
    learned = matrix[np.arange(earlier.shape[1])[None, :], earlier]
    return float((matrix[-1][earlier] - learned).mean())


def forward_transfer(
    correct: np.ndarray, total: np.ndarray, orders: np.ndarray, task_sizes: np.ndarray
) -> float | None:
    """FWT: the accuracy on a task just before a client meets it, less that of guessing, 1 / |Y^(p)|.

    Predictions are the arg-max over Y^(p), the classes of all tasks that any client has had. So a class that no client
    has had cannot be predicted, and only pairs of client and task count that another client has met before. The mean is
    over these pairs; None if there are none, as in a homogeneous stream. `task_sizes` are the numbers of classes.
    """
    before = correct[:-1]
    matrix = accuracy(before, total)
    guessing = 1 / ((before >= 0) @ task_sizes)
    gains = (matrix - guessing[:, None])[np.arange(len(before))[None, :], orders[:, 1:]]
    known = gains[~np.isnan(gains)]
    return float(known.mean()) if len(known) else None


def further_summary(
    correct: np.ndarray, total: np.ndarray, orders: np.ndarray, examples: np.ndarray, task_sizes: np.ndarray
) -> dict[str, float | None]:
    """In percent: the least accuracy of a client, the standard deviation over clients, BWT and FWT."""
    of_clients = client_accuracy(correct, total, examples)
    known = of_clients[~np.isnan(of_clients)]
    forward = forward_transfer(correct, total, orders, task_sizes)
    return {
        "worst_client": 100 * float(known.min()) if len(known) else None,
        "client_sd": 100 * float(known.std()) if len(known) else None,
        "bwt": 100 * backward_transfer(correct, total, orders),
        "fwt": None if forward is None else 100 * forward,
    }
