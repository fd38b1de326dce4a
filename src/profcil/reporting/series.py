"""What figures and the page draw, as plain arrays from runs: percent over positions and tasks, bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profcil.metrics.client_first import accuracy, cumulative_accuracy
from profcil.runs.reader import Run, read_alignments


def task_accuracy(run: Run) -> np.ndarray:
    """[positions, tasks] in percent; NaN where a task was not introduced, or the run has not got there."""
    return 100 * accuracy(run.scores.correct, run.scores.total)


def played(run: Run) -> int:
    """Positions that have been scored; every one of them has met at least one task."""
    return int((run.scores.correct >= 0).any(axis=1).sum())


def seen_accuracy(run: Run) -> np.ndarray:
    """The clients' mean cumulative accuracy at each position; its last value is FAA. NaN before it was played."""
    out = np.full(run.plan.positions, np.nan)
    for p in range(played(run)):
        out[p] = 100 * cumulative_accuracy(run.scores.correct, run.scores.total, run.plan.orders, p).mean()
    return out


def current_accuracy(run: Run) -> np.ndarray:
    """CTA at each position; the mean over positions is the run's CTA. NaN before it was played."""
    here = np.arange(run.plan.positions)
    return task_accuracy(run)[here[None, :], run.plan.orders].mean(axis=0)


def alignment(run: Run) -> np.ndarray:
    """Centred cosine between remembered and true means of old classes at each position; NaN where nothing is old, or
    the method remembers no means."""
    noted = [a.get("memory", {}).get("centred") for a in read_alignments(run.path)]
    out = np.full(run.plan.positions, np.nan)
    for p, value in enumerate(noted[: len(out)]):
        out[p] = np.nan if value is None else value
    return out


def kinds(run: Run) -> dict[tuple[str, str], int]:
    """Bytes of the incremental stream by (kind, direction); the warm-up is common to all methods and left out."""
    sums: dict[tuple[str, str], int] = {}
    for (stage, kind, direction), count in run.ledger.by("stage", "kind", "direction").items():
        if stage != "warmup":
            sums[kind, direction] = sums.get((kind, direction), 0) + count
    return sums


def mean_and_spread(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation over seeds, position by position; one seed has no spread (zeros)."""
    stacked = np.stack(rows)
    spread = stacked.std(axis=0, ddof=1) if len(stacked) > 1 else np.zeros(stacked.shape[1:])
    return stacked.mean(axis=0), spread
