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
from profcil.reporting.tables import compare
from profcil.runs.gather import group_runs, stream_name
from profcil.runs.reader import Run, finite_or_none
from profcil.runs.settings_check import flatten_settings
from profcil.runs.stored_run import StoredRun

MAX_CLIENT_ROWS = 200  # with more clients than this the picture of the stream shows counts
MEASURED = (
    "faa",
    "cta",
    "af",
    "norm_comm",
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
    rows = zip(runs, compare(runs), short_names(runs), strict=True)
    described = [describe_run(run, row, name) for run, row, name in rows]
    plans = {run.plan.digest: run.plan for run in runs if not isinstance(run, StoredRun)}  # a store has no plans
    described_plans = {digest: describe_plan(plan) for digest, plan in plans.items()}
    return {
        "runs": described,
        "groups": describe_groups(runs),
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
        unique = (options[i] for options in (without_hash, folders, paths) if options.count(options[i]) == 1)
        names.append(next(unique, paths[i]))
    return names


def describe_run(run: Run, row: dict[str, Any], name: str) -> dict[str, Any]:
    """One run; `row` is its row of `compare`."""
    facts = {key: plain_value(run.facts.get(key)) for key in FACTS}
    names = {key: row[key] for key in ("method", "dataset", "setting", "seed")}
    measured = {key: finite_or_none(row[key]) for key in MEASURED}
    config = {key: plain_value(value) for key, value in flatten_settings(run.config).items()}
    return {
        "name": name,
        "done": run.done,
        "played": series.scored_positions(run),
        "stream": stream_name(run),
        **names,
        **measured,
        "tasks": to_lists(series.task_accuracy(run)),
        "plan": run.plan.digest,
        "ledger": describe_ledger(run),
        "config": config,
        "environment": {"folder": run.path.name, **facts, **environment(run)},
    }


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


def describe_groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Finished runs that differ only in the seed; `members` are indices of the page's runs."""
    indices = {id(run): i for i, run in enumerate(runs)}
    groups = []
    for group in group_runs([run for run in runs if run.done]):
        curves = {}
        for name, values in (("seen", series.seen_accuracy), ("current", series.current_accuracy)):
            mean, spread = series.mean_and_spread([values(run) for run in group.runs])
            curves[name] = {"mean": to_lists(mean[None])[0], "sd": to_lists(spread[None])[0]}
        members = [indices[id(run)] for run in group.runs]
        seeds = [run.config["seed"] for run in group.runs]
        groups.append({"stream": group.stream, "label": group.label, "members": members, "seeds": seeds, **curves})
    return groups


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The task of each client at each position.

    With few clients there is a row per client; a client without data has -1 - task. With many clients there are
    counts by task instead, for clients with and without data.
    """
    about = {"clients": plan.clients, "positions": plan.positions, "tasks": [list(task) for task in plan.tasks]}
    has_data = np.take_along_axis(plan.counts, plan.orders.astype(np.int64), axis=1) > 0
    if plan.clients <= MAX_CLIENT_ROWS:
        return about | {"rows": np.where(has_data, plan.orders, -1 - plan.orders).tolist()}
    tally = []
    for p in range(plan.positions):
        busy = np.bincount(plan.orders[has_data[:, p], p], minlength=plan.positions)
        idle = np.bincount(plan.orders[~has_data[:, p], p], minlength=plan.positions)
        tally.append({"busy": busy.tolist(), "idle": idle.tolist()})
    return about | {"tally": tally}


def to_lists(values: np.ndarray) -> list[list[float | None]]:
    """The values with three decimals, and None in place of NaN."""
    return [[rounded_or_none(value) for value in row] for row in values]


def rounded_or_none(value: float) -> float | None:
    return round(float(value), 3) if math.isfinite(value) else None


def plain_value(value: Any) -> Any:
    """A value that the page can show: text, number, boolean or null; anything else as JSON text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, default=str)
