"""Does a larger gap between replay and reality go with a larger drop on later tasks? One point per weak run.

The paper's A_post, mismatch and Δ_down (weak-task stress test), read from run folders and their diagnostics. Accuracies
are in percent. A weak run without its clean run, or whose replay was not examined, gives no point.
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
from profcil.runs.reader import Run, load_run
from profcil.studies.definition import WITHOUT_EFFECT, Cell, is_finished, read_json

if TYPE_CHECKING:
    from profcil.protocol.plan import Plan

GAPS = ("mmd2", "w1", "cosine")


def weak_accuracy(scores: np.ndarray, plan: Plan, task: int) -> float:
    """A_post: accuracy on a task right after it was learnt, averaged over the clients of the clean plan that have it.

    Clients meet the task at different positions, so "right after" is each client's own.
    """
    met = np.argsort(plan.orders, axis=1, kind="stable")[plan.supporters(task), task]
    return float(np.nanmean(scores[met, task]))


def point(weak: Run, runs: Sequence[Run]) -> dict[str, Any] | None:
    """What a weak run shows beside its clean one; None where that is not among the runs."""
    from profcil.diagnostics.replay_gap import downstream_drop

    clean = next((r for r in runs if r.done and is_clean(r.config) and same_but_weak(r.config, weak.config)), None)
    task = weak.config["stream"]["weak_task"]
    if clean is None or not weak.done or task >= weak.plan.positions - 1:
        return None
    before, after = (100 * accuracy(r.scores.correct, r.scores.total) for r in (clean, weak))
    gap = ((read_json(weak.path / "diagnostics.json").get("replay") or {}).get("tasks", {}).get(str(task))) or {}
    return {
        "weak_accuracy": weak_accuracy(after, clean.plan, task),
        "drop": downstream_drop(before[-1].tolist(), after[-1].tolist(), task),
        **{name: gap.get(name) for name in GAPS},
    }


def is_clean(config: Mapping[str, Any]) -> bool:
    return config["stream"].get("weak_task", -1) < 0


def same_but_weak(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two runs differ in nothing but the intervention and what no result depends on."""

    def rest(config: Mapping[str, Any]) -> dict[str, Any]:
        stream = {k: v for k, v in config["stream"].items() if not k.startswith("weak_")}
        ignored = (*WITHOUT_EFFECT, "device", "keep_memories")
        return {k: v for k, v in config.items() if k not in ignored} | {"stream": stream}

    return rest(one) == rest(two)


def clean_cell(cell: Cell) -> Cell:
    stream = replace(cell.config.stream, weak_task=-1, weak_strength="")
    return replace(cell, config=replace(cell.config, stream=stream))


def collect(todo: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """The points of a study's finished weak runs whose replay was examined."""
    rows = []
    for cell in (c for c in todo if c.config.stream.weak_task >= 0):
        clean = clean_cell(cell)
        if is_finished(out, cell) and is_finished(out, clean):
            weak = load_run(out / cell.name)
            found = point(weak, [load_run(out / clean.name)])
            if found and all(found[name] is not None for name in GAPS):
                c = cell.config
                names = {"dataset": c.dataset, "method": c.method, "seed": c.seed}
                weakness = {"strength": c.stream.weak_strength, "task": c.stream.weak_task}
                rows.append({**names, **weakness, **found})
    return rows


def trends(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per dataset and method, the rank correlation of MMD² and drop with its interval, or why there is none."""
    from profcil.diagnostics.replay_gap import rank_correlation

    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dataset"], row["method"]), []).append(row)
    out = []
    for (dataset, method), group in groups.items():
        found: dict[str, Any] = {"dataset": dataset, "method": method, "runs": len(group)}
        try:
            xs, ys = ([row[key] for row in group] for key in ("mmd2", "drop"))
            found |= rank_correlation(xs, ys, seed=0)._asdict()
        except DataError as error:
            found |= {"rho": None, "why": str(error)}
        out.append(found)
    return out


def write_mismatch(todo: Sequence[Cell], out: Path) -> None:
    """mismatch.json and mismatch-trends.json in the study's folder, where the study weakens a task."""
    if any(cell.config.stream.weak_task >= 0 for cell in todo):
        rows = collect(todo, out)
        for name, value in (("mismatch.json", rows), ("mismatch-trends.json", trends(rows))):
            write_text(out / name, json.dumps(value, indent=1) + "\n")
