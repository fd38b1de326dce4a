"""Points of weak and clean runs, on constructed runs with a known result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from profcil.diagnostics.mismatch import mismatch_point, same_but_weak, trends, weak_accuracy
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.plan_making import assemble
from profcil.protocol.settings import StreamSettings
from profcil.runs.reader import Run

TASKS = ((0,), (1,), (2,))
ORDERS = np.array([[0, 1, 2], [1, 0, 2]])  # task 1 is the first task of client 1
OWNERS = np.array([0, 1, 0, 1, 0, 1])
PLAN = assemble(np.array([0, 0, 1, 1, 2, 2]), OWNERS, TASKS, ORDERS, StreamSettings(2, 2, 1), 0)


def a_run(path: Path, correct: list[list[int]], weak: int = -1, **config: object) -> Run:
    stream = {"clients": 2, "weak_task": weak, "weak_strength": "severe" if weak >= 0 else ""}
    names = {"method": "pro", "dataset": "d", "setting": "severe", "seed": 0, "device": "cpu", "stream": stream}
    scores = Scores(np.array(correct), np.array([10, 10, 10]))
    return Run(path, names | config, {"done": True}, scores, Ledger(), PLAN)


def test_weak_accuracy_is_taken_at_each_clients_position_of_the_task():
    scores = np.array([[np.nan, 0.4, np.nan], [0.9, 0.8, np.nan], [0.1, 0.1, 0.1]])
    assert weak_accuracy(scores, PLAN, 1) == pytest.approx((0.8 + 0.4) / 2)  # client 0 at position 1, client 1 at 0
    alone = assemble(np.array([0, 1, 2]), np.array([0, 0, 1]), TASKS, ORDERS, StreamSettings(2, 2, 1), 0)
    assert weak_accuracy(scores, alone, 1) == pytest.approx(0.8)  # clients without data of the task are left out


def test_a_point_compares_later_tasks_with_the_clean_run(tmp_path):
    clean = a_run(tmp_path / "a", [[5, 5, -1], [5, 6, -1], [2, 4, 9]])
    weak = a_run(tmp_path / "b", [[5, 1, -1], [5, 3, -1], [2, 1, 7]], weak=1, device="cuda")
    weak.path.mkdir()
    gap = {"mmd2": 0.5, "w1": 2.0, "cosine": 0.1, "classes": 1}
    (weak.path / "diagnostics.json").write_text(json.dumps({"replay": {"tasks": {"1": gap}}}))
    found = mismatch_point(weak, [weak, clean])
    assert found == {"weak_accuracy": pytest.approx(20.0), "drop": pytest.approx(20.0), "mmd2": 0.5, "w1": 2.0,
                     "cosine": 0.1}  # fmt: skip
    other_seed = a_run(tmp_path / "c", [[0] * 3] * 3, seed=1)
    assert mismatch_point(weak, [weak, other_seed]) is None


def test_a_run_without_diagnostics_has_accuracy_and_drop_but_no_gap(tmp_path):
    clean = a_run(tmp_path / "a", [[5, 5, 5]] * 3)
    weak = a_run(tmp_path / "b", [[5, 5, 5]] * 3, weak=1)
    found = mismatch_point(weak, [clean])
    assert found["drop"] == 0.0 and found["mmd2"] is None


def test_a_weak_last_task_gives_no_point(tmp_path):
    clean = a_run(tmp_path / "a", [[5, 5, 5]] * 3)
    weak = a_run(tmp_path / "b", [[5, 5, 5]] * 3, weak=2)
    assert mismatch_point(weak, [clean]) is None


def test_only_the_weak_task_and_irrelevant_settings_may_differ(tmp_path):
    one = a_run(tmp_path, [[1, 1, 1]] * 3).config
    assert same_but_weak(one, a_run(tmp_path, [[1, 1, 1]] * 3, weak=1, device="cuda").config)
    assert not same_but_weak(one, a_run(tmp_path, [[1, 1, 1]] * 3, method="promax").config)


def test_trends_are_rank_correlations_per_method_or_a_reason():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    xs = rng.normal(size=9)
    ys = rng.normal(size=9)
    rows = [{"dataset": "d", "method": "a", "mmd2": x, "drop": y} for x, y in zip(xs, ys, strict=True)]
    rows += [{"dataset": "d", "method": "b", "mmd2": 1.0, "drop": 2.0}]
    a, b = trends(rows)
    assert a["rho"] == pytest.approx(stats.spearmanr(xs, ys).statistic) and a["low"] <= a["rho"] <= a["high"]
    assert (a["runs"], b["runs"], b["rho"]) == (9, 1, None) and "at least 3" in b["why"]
