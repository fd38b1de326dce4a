"""What the page shows of each run, as plain values that JSON can hold: what is unknown is null, never NaN."""

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
from profcil.runs.reader import Run
from profcil.runs.settings_check import flatten_settings

SINGLE = 200  # clients up to which each has its own row in the picture of the stream
ROW = (
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
HASH = re.compile(r"-[0-9a-f]{16}$")  # what a study appends to a folder's name
FACTS = ("version", "plan", "data", "warmup_cached")


def page_data(runs: Sequence[Run], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything in the page; plans are kept once, however many runs share them."""
    rows, names = compare(runs), names_of(runs)
    plans = {run.plan.digest: run.plan for run in runs}
    return {
        "runs": [one(run, row, name) for run, row, name in zip(runs, rows, names, strict=True)],
        "groups": groups(runs),
        "plans": {digest: picture(plan) for digest, plan in plans.items()},
        "notes": list(notes),
    }


def names_of(runs: Sequence[Run]) -> list[str]:
    """The shortest name that is a run's own: its folder without a study's hash, its folder, or its path as given."""
    ways = [[HASH.sub("", r.path.name) for r in runs], [r.path.name for r in runs], [str(r.path) for r in runs]]
    return [next((w[i] for w in ways if w.count(w[i]) == 1), ways[-1][i]) for i in range(len(runs))]


def one(run: Run, row: dict[str, Any], name: str) -> dict[str, Any]:
    ledger = run.ledger.by("kind", "direction")
    stream = series.kinds(run)
    return {
        "name": name,
        "done": run.done,
        "played": series.played(run),
        "stream": stream_name(run),
        **{key: row[key] for key in ("method", "dataset", "setting", "seed")},
        **{key: number(row[key]) for key in ROW},
        "tasks": table(series.task_accuracy(run)),
        "plan": run.plan.digest,
        "ledger": [
            {"kind": k, "direction": d, "stream": stream.get((k, d), 0), "warmup": total - stream.get((k, d), 0)}
            for (k, d), total in sorted(ledger.items())
        ],
        "config": {key: plain(value) for key, value in flatten_settings(run.config).items()},
        "environment": {"folder": run.path.name, **{k: plain(run.facts.get(k)) for k in FACTS}, **environment(run)},
    }


def environment(run: Run) -> dict[str, Any]:
    found = run.facts.get("environment")
    return {key: plain(value) for key, value in found.items()} if isinstance(found, dict) else {}


def groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Seeds of one method together, runs that have ended only; `members` counts into the page's runs."""
    places = {id(run): i for i, run in enumerate(runs)}
    out = []
    for group in group_runs([run for run in runs if run.done]):
        curves = {}
        for name, value in (("seen", series.seen_accuracy), ("current", series.current_accuracy)):
            mean, spread = series.mean_and_spread([value(run) for run in group.runs])
            curves[name] = {"mean": table(mean[None])[0], "sd": table(spread[None])[0]}
        members, seeds = [places[id(run)] for run in group.runs], [run.config["seed"] for run in group.runs]
        out.append({"stream": group.stream, "label": group.label, "members": members, "seeds": seeds, **curves})
    return out


def picture(plan: Plan) -> dict[str, Any]:
    """Who meets what when. A row per client, idle cells as -1 - task; for very many clients counts instead."""
    about = {"clients": plan.clients, "positions": plan.positions, "tasks": [list(task) for task in plan.tasks]}
    busy = np.take_along_axis(plan.counts, plan.orders.astype(np.int64), axis=1) > 0
    if plan.clients <= SINGLE:
        return about | {"rows": np.where(busy, plan.orders, -1 - plan.orders).tolist()}
    tally = [
        [np.bincount(plan.orders[who, p], minlength=plan.positions).tolist() for who in (busy[:, p], ~busy[:, p])]
        for p in range(plan.positions)
    ]
    return about | {"tally": [{"busy": with_data, "idle": idle} for with_data, idle in tally]}


def table(values: np.ndarray) -> list[list[float | None]]:
    return [[round(float(v), 3) if math.isfinite(v) else None for v in row] for row in values]


def number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """A value as a reader writes it: text, number, yes or no."""
    return value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value, default=str)
