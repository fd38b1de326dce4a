"""The data of figures and the HTML page as arrays: percent by position and task, bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profcil.metrics.client_first import accuracy
from profcil.runs.reader import Run


def task_accuracy(run: Run) -> np.ndarray:
    """[positions, tasks] in percent; NaN if the task is not introduced yet or the run has not reached the position."""
    return 100 * accuracy(run.scores.correct, run.scores.total)


def scored_positions(run: Run) -> int:
    """The number of positions that have been scored; each of them has introduced at least one task."""
    return run.scored_positions()


def seen_accuracy(run: Run) -> np.ndarray:
    """The mean cumulative accuracy of the clients at each position; the last value is FAA. NaN if not scored yet."""
    return run.seen_accuracy()


def current_accuracy(run: Run) -> np.ndarray:
    """CTA at each position; its mean over positions is the CTA of the run. NaN if not scored yet."""
    return run.current_accuracy()


def final_accuracy(run: Run) -> np.ndarray:
    """The accuracy of every task after the last position, in percent."""
    final: np.ndarray = task_accuracy(run)[-1]
    return final


def task_forgetting(run: Run) -> np.ndarray:
    """For every task the best accuracy that it had after any position, minus its accuracy after the last one."""
    by_position = task_accuracy(run)
    best = np.fmax.reduce(by_position, axis=0)
    drop: np.ndarray = best - by_position[-1]
    return drop


def alignment(run: Run) -> np.ndarray:
    """Centred cosine between stored and true means of old classes at each position.

    NaN if there are no old classes, or the method stores no means.
    """
    out = np.full(run.positions, np.nan)
    for p, entry in enumerate(run.alignments()[: len(out)]):
        value = entry.get("memory", {}).get("centred")
        out[p] = np.nan if value is None else value
    return out


def bytes_by_kind(run: Run) -> dict[tuple[str, str], int]:
    """Bytes of the incremental stream by (kind, direction); the warm-up, the same for all methods, is excluded."""
    sums: dict[tuple[str, str], int] = {}
    for (stage, kind, direction), count in run.ledger.by("stage", "kind", "direction").items():
        if stage != "warmup":
            sums[kind, direction] = sums.get((kind, direction), 0) + count
    return sums


def mean_and_spread(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation over seeds at each position; the deviation of a single seed is zero."""
    stacked = np.stack(rows)
    mean = stacked.mean(axis=0)
    spread = stacked.std(axis=0, ddof=1) if len(stacked) > 1 else np.zeros_like(mean)
    return mean, spread
