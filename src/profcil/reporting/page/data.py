"""The data of the HTML page as plain values for JSON; unknown values are null, never NaN."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from profcil.protocol.plan import Plan
from profcil.reporting import series
from profcil.reporting.groups import Group, distinguishing_settings, group_runs, name_parts
from profcil.reporting.looks import look_number, method_look
from profcil.reporting.paper import stream_title
from profcil.reporting.ranking import NAMES, OCCASIONAL, Spread, Standing, rank_groups
from profcil.reporting.tables import compare
from profcil.runs.gather import stream_name
from profcil.runs.reader import Run, dataset_title, finite_or_none
from profcil.runs.results.stored_run import StoredRun
from profcil.runs.settings_check import flatten_settings

MAX_CLIENT_ROWS = 200  # with more clients than this the picture of the stream shows counts
MEASURED = (
    "faa",
    "cta",
    "af",
    "norm_comm",
    "bytes_total",
    "bytes_down",
    "bytes_up",
    "seconds",
    "warmup_seconds",
    "peak_memory_mb",
    "server_memory_bytes",
    "client_extra_bytes",
)
HASH = re.compile(r"-[0-9a-f]{16}$")  # the hash that a study appends to the name of a run folder
FACTS = ("version", "plan", "data", "warmup_cached")


def page_data(runs: Sequence[Run], warnings: Sequence[str] = ()) -> dict[str, Any]:
    """All data of the page. A plan that several runs share is included once."""
    rows = compare(runs)
    labels = distinguishing_settings(runs)
    named = zip(runs, rows, short_names(runs), labels, strict=True)
    described = [describe_run(run, row, name, settings) for run, row, name, settings in named]
    plans = {run.plan.digest: run.plan for run in runs if not isinstance(run, StoredRun)}  # a store has no plans
    described_plans = {digest: describe_plan(plan) for digest, plan in plans.items()}
    names = {}
    for key, (short, long) in NAMES.items():
        if key not in OCCASIONAL or any(row.get(key) is not None for row in rows):
            names[key] = {"short": short, "long": long}
    return {
        "runs": described,
        "groups": describe_groups(runs, rows),
        "names": names,
        "plans": described_plans,
        "notes": list(warnings),
    }


def short_names(runs: Sequence[Run]) -> list[str]:
    """The shortest unique name of each run: the folder without a study's hash, the folder, or the path as given."""
    without_hash = [HASH.sub("", run.path.name) for run in runs]
    folders = [run.path.name for run in runs]
    paths = [str(run.path) for run in runs]
    names = []
    for i in range(len(runs)):
        name = paths[i]
        for options in (folders, without_hash):  # the shortest last
            if options.count(options[i]) == 1:
                name = options[i]
        names.append(name)
    return names


def describe_run(run: Run, row: dict[str, Any], name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run; `row` is its row of `compare`, `settings` those that distinguish it from other runs of its method."""
    facts = {key: plain_value(run.facts.get(key)) for key in FACTS}
    names = {key: row[key] for key in ("method", "dataset", "setting", "seed")}
    measured = {key: finite_or_none(row[key]) for key in MEASURED}
    config = {key: plain_value(value) for key, value in flatten_settings(run.config).items()}
    played = 0
    tasks: list[list[float | None]] = []
    has_scores = len(run.scores.correct) > 0  # not of a row that was imported into a store
    if has_scores:
        played = series.scored_positions(run)
        tasks = to_lists(series.task_accuracy(run))
    title, texts = name_parts(run.config["method"], settings)
    look = look_number(run.config["method"])
    variant = ", ".join(texts)
    described = {"name": name, "title": title, "look": look, "variant": variant, "done": run.done}
    described |= {"played": played, "stream": stream_name(run), **names, **measured, "tasks": tasks}
    described |= {"plan": run.plan.digest, "ledger": describe_ledger(run), "config": config}
    described["environment"] = {"folder": run.path.name, **facts, **environment(run)}
    return described


def describe_ledger(run: Run) -> list[dict[str, Any]]:
    """Bytes by kind and direction, in the stream and in the warm-up."""
    in_stream = series.bytes_by_kind(run)
    entries = []
    for (kind, direction), total in sorted(run.ledger.by("kind", "direction").items()):
        stream = in_stream.get((kind, direction), 0)
        entries.append({"kind": kind, "direction": direction, "stream": stream, "warmup": total - stream})
    return entries


def environment(run: Run) -> dict[str, Any]:
    facts = run.facts.get("environment")
    if not isinstance(facts, dict):
        return {}
    return {key: plain_value(value) for key, value in facts.items()}


def describe_groups(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Finished runs that differ only in the seed, by stream and then by mean FAA, the highest first."""
    indices = {id(run): i for i, run in enumerate(runs)}
    by_run = {id(run): row for run, row in zip(runs, rows, strict=True)}
    finished = [run for run in runs if run.done]
    rankings = rank_groups(group_runs(finished), by_run)
    groups = []
    for standings in rankings.values():
        for standing in standings:
            members = [indices[id(run)] for run in standing.group.runs]
            described = describe_standing(standing) | describe_curves(standing.group)
            groups.append(described | {"members": members})
    return groups


def describe_standing(standing: Standing) -> dict[str, Any]:
    """The names and results of a group; `members` of the page are indices of its runs."""
    group = standing.group
    config = group.runs[0].config
    stream = stream_title(group.stream)
    dataset = stream_title(dataset_title(config))
    setting = stream.removeprefix(f"{dataset}, ")
    title, settings = name_parts(group.method, group.settings)
    described: dict[str, Any] = {
        "stream": stream,
        "dataset": dataset,
        "setting": setting,
        "method": group.method,
        "title": title,
    }
    described |= {"settings": settings, "label": group.label, "variant": group.variant}
    described["look"] = look_number(group.method)
    described["marker"] = method_look(group.method).marker
    described["seeds"] = [run.config["seed"] for run in group.runs]
    described["best"] = sorted(standing.best)
    described["p"] = standing.p
    described["values"] = {name: describe_spread(value) for name, value in standing.values.items()}
    return described


def describe_spread(value: Spread | None) -> dict[str, float | None] | None:
    return None if value is None else {"mean": value.mean, "sd": value.sd}


def known_alignment(run: Run) -> np.ndarray:
    """The alignment at each position; NaN in a folder without events, which the other parts of the page do not need."""
    events = run.path / "events.jsonl"
    if not isinstance(run, StoredRun) and not events.exists():
        return np.full(run.positions, np.nan)
    return series.alignment(run)


CURVES = {
    "seen": series.seen_accuracy,
    "current": series.current_accuracy,
    "alignment": known_alignment,
    "forgetting": series.task_forgetting,
    "final": series.final_accuracy,
}


def describe_curves(group: Group) -> dict[str, Any]:
    """Values over positions and by task, means over seeds; null where a run has no scores by task."""
    curves: dict[str, Any] = dict.fromkeys(CURVES)
    if not all(len(run.scores.correct) for run in group.runs):
        return curves
    for name, values in CURVES.items():
        by_seed = [values(run) for run in group.runs]
        mean, deviation = series.mean_and_spread(by_seed)
        if not np.isnan(mean).all():
            curves[name] = {"mean": to_list(mean), "sd": to_list(deviation)}
    return curves


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The task of each client at each position.

    With few clients there is a row per client; a client without data has -1 - task. With many clients there are
    counts by task instead, for clients with and without data.
    """
    tasks = [list(task) for task in plan.tasks]
    about = {"clients": plan.clients, "positions": plan.positions, "tasks": tasks}
    counts = np.take_along_axis(plan.counts, plan.orders.astype(np.int64), axis=1)
    has_data = counts > 0
    if plan.clients <= MAX_CLIENT_ROWS:
        rows = np.where(has_data, plan.orders, -1 - plan.orders)
        return about | {"rows": rows.tolist()}
    tally = []
    for p in range(plan.positions):
        tasks_here = plan.orders[:, p]
        with_data = has_data[:, p]
        busy = np.bincount(tasks_here[with_data], minlength=plan.positions)
        idle = np.bincount(tasks_here[~with_data], minlength=plan.positions)
        tally.append({"busy": busy.tolist(), "idle": idle.tolist()})
    return about | {"tally": tally}


def to_lists(values: np.ndarray) -> list[list[float | None]]:
    """The values with three decimals, and None in place of NaN."""
    return [to_list(row) for row in values]


def to_list(values: np.ndarray) -> list[float | None]:
    return [rounded_or_none(value) for value in values]


def rounded_or_none(value: float) -> float | None:
    return round(float(value), 3) if math.isfinite(value) else None


def plain_value(value: Any) -> Any:
    """A value that the page can show: text, number, boolean or null; anything else as JSON text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str)
