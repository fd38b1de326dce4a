"""The relation between the replay gap of a weak task and the accuracy drop on later tasks. One point per weak run.

These are the paper's A_post, mismatch and Δ_down (weak-task stress test), read from run folders and their diagnostics.
Accuracies are in percent. A weak run without a clean run, or without a diagnosed replay, gives no point.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import DataError
from profcil.io.atomic_files import write_text
from profcil.metrics.client_first import accuracy
from profcil.runs.identity import WITHOUT_EFFECT, read_json
from profcil.runs.reader import Run, load_run
from profcil.studies.definition import Cell, is_finished

if TYPE_CHECKING:
    from profcil.protocol.plan import Plan

GAPS = ("mmd2", "w1", "cosine")


def weak_accuracy(scores: np.ndarray, plan: Plan, task: int) -> float:
    """A_post: the accuracy on a task right after it was learnt, averaged over the supporters in the clean plan.

    Clients have the task at different positions, so "right after" differs between clients.
    """
    position_of = np.argsort(plan.orders, axis=1, kind="stable")
    learnt_at = position_of[plan.supporters(task), task]
    accuracies = scores[learnt_at, task]
    return float(np.nanmean(accuracies))


def mismatch_point(weak: Run, runs: Sequence[Run]) -> dict[str, Any] | None:
    """The accuracy, drop and replay gap of a weak run; None if its clean run is not among the runs."""
    from profcil.diagnostics.replay_gap import downstream_drop

    clean = find_clean_run(weak, runs)
    task = weak.config["stream"]["weak_task"]
    is_last_task = task >= weak.plan.positions - 1
    if clean is None or not weak.done or is_last_task:
        return None
    clean_scores = percent_scores(clean)
    weak_scores = percent_scores(weak)
    final_clean = clean_scores[-1].tolist()
    final_weak = weak_scores[-1].tolist()
    point: dict[str, Any] = {
        "weak_accuracy": weak_accuracy(weak_scores, clean.plan, task),
        "drop": downstream_drop(final_clean, final_weak, task),
    }
    gap = task_gap(weak.path, task)
    for name in GAPS:
        point[name] = gap.get(name)
    return point


def percent_scores(run: Run) -> np.ndarray:
    """The accuracies [positions, tasks] of a run in percent."""
    return 100 * accuracy(run.scores.correct, run.scores.total)


def find_clean_run(weak: Run, runs: Sequence[Run]) -> Run | None:
    """The finished run with the same settings but no weak task, or None."""
    for run in runs:
        is_clean_run = run.done and is_clean(run.config)
        if is_clean_run and same_but_weak(run.config, weak.config):
            return run
    return None


def task_gap(folder: Path, task: int) -> dict[str, Any]:
    """The replay gap of a task in a run's diagnostics; empty if it was not measured."""
    diagnostics = read_json(folder / "diagnostics.json")
    replay = diagnostics.get("replay") or {}
    tasks = replay.get("tasks", {})
    return tasks.get(str(task)) or {}


def is_clean(config: Mapping[str, Any]) -> bool:
    """Whether a run has no weak task."""
    return config["stream"].get("weak_task", -1) < 0


def same_but_weak(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two runs differ only in the weak task and in settings that no result depends on."""
    return relevant_settings(one) == relevant_settings(two)


def relevant_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that results depend on, without those of the weak task."""
    irrelevant = (*WITHOUT_EFFECT, "device", "keep_memories", "keep_states")
    settings = {key: value for key, value in config.items() if key not in irrelevant}
    stream = config["stream"]
    without_weak = {key: value for key, value in stream.items() if not key.startswith("weak_")}
    return settings | {"stream": without_weak}


def clean_cell(cell: Cell) -> Cell:
    """The cell of a study with the same settings but no weak task."""
    stream = replace(cell.config.stream, weak_task=-1, weak_strength="")
    config = replace(cell.config, stream=stream)
    return replace(cell, config=config)


def collect(todo: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """The points of all finished weak runs of a study whose replay gap was measured."""
    weak_cells = [cell for cell in todo if not is_clean_cell(cell)]
    rows = [cell_row(cell, out) for cell in weak_cells]
    return [row for row in rows if row is not None]


def cell_row(cell: Cell, out: Path) -> dict[str, Any] | None:
    """The settings and the point of one weak run; None if a run or its replay gap is missing."""
    clean = clean_cell(cell)
    if not (is_finished(out, cell) and is_finished(out, clean)):
        return None
    weak = load_run(out / cell.name)
    clean_run = load_run(out / clean.name)
    point = mismatch_point(weak, [clean_run])
    if not point or not has_gaps(point):
        return None
    config = cell.config
    names = {"dataset": config.dataset, "method": config.method, "seed": config.seed}
    weakness = {"strength": config.stream.weak_strength, "task": config.stream.weak_task}
    return {**names, **weakness, **point}


def has_gaps(point: Mapping[str, Any]) -> bool:
    """Whether the replay gap of a point was measured."""
    return all(point[name] is not None for name in GAPS)


def trends(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per dataset and method, the rank correlation of MMD² and drop with its interval, or why there is none."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["dataset"], row["method"])
        groups.setdefault(key, []).append(row)
    out = []
    for (dataset, method), group in groups.items():
        names = {"dataset": dataset, "method": method, "runs": len(group)}
        out.append({**names, **trend(group)})
    return out


def trend(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rank correlation of one group, or the reason why it cannot be computed."""
    from profcil.diagnostics.replay_gap import rank_correlation

    gaps = [row["mmd2"] for row in group]
    drops = [row["drop"] for row in group]
    try:
        return rank_correlation(gaps, drops, seed=0)._asdict()
    except DataError as error:
        return {"rho": None, "why": str(error)}


def write_mismatch(todo: Sequence[Cell], out: Path) -> None:
    """Write mismatch.json and mismatch-trends.json into the study's folder, if the study has weak tasks."""
    if all(is_clean_cell(cell) for cell in todo):
        return
    rows = collect(todo, out)
    write_rows(out / "mismatch.json", rows)
    write_rows(out / "mismatch-trends.json", trends(rows))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = json.dumps(rows, indent=1)
    write_text(path, text + "\n")


def is_clean_cell(cell: Cell) -> bool:
    """Whether a cell of a study has no weak task."""
    return cell.config.stream.weak_task < 0
