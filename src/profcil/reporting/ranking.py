"""Which method is best: the groups of each stream by mean FAA, with mean and spread over seeds of what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from profcil.reporting.groups import Group, group_runs
from profcil.reporting.significance import holm, p_against
from profcil.reporting.tables import compare
from profcil.runs.reader import Run
from profcil.runs.results.stored_run import StoredRun

BETTER = {"faa": 1, "cta": 1, "af": -1}  # whether more or less of it is better
OCCASIONAL = ("epsilon", "dropped")  # shown where a run has them
MEASURED = (*BETTER, "norm_comm", "bytes_total", "probe_warm", "probe_end", "centred", *OCCASIONAL)
NAMES = {  # how the values are called, and what they are in one line
    "faa": ("FAA", "Final average accuracy: the clients' mean accuracy on all tasks after the last one, in percent"),
    "cta": (
        "CTA",
        "Current-task accuracy: accuracy on the task just learned, mean over the stream, in percent",
    ),
    "af": ("AF", "Average forgetting: points lost since a task was known best; less is better"),
    "norm_comm": ("NormComm", "Traffic of the stream, divided by FedAvg's traffic in the same stream; less is better"),
    "epsilon": ("ε", "Differential privacy: the budget that the run spent; less reveals less (docs/privacy.md)"),
    "dropped": ("dropped", "Replies of clients that were out of range and not used (docs/robustness.md)"),
}


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; a single seed has no deviation."""

    mean: float
    sd: float | None


Values = dict[str, Spread | None]  # by the names of MEASURED; None if a seed lacks the value


@dataclass(frozen=True)
class Standing:
    """One group in the ranking of its stream."""

    group: Group
    values: Values
    best: frozenset[str]  # in which values no other group of the stream is better
    p: float | None = None  # of a difference in FAA from the first: paired t-test over common seeds, adjusted by Holm


def rank_runs(runs: Sequence[Run]) -> dict[str, list[Standing]]:
    """For every stream its groups, the highest mean FAA first. `runs` are finished."""
    ids = [id(run) for run in runs]
    rows = dict(zip(ids, compare(runs), strict=True))
    return rank_groups(group_runs(runs), rows)


def rank_groups(groups: Sequence[Group], rows: Mapping[int, Mapping[str, Any]]) -> dict[str, list[Standing]]:
    """As `rank_runs`, of groups; `rows` has the row of `compare` of each run, by its id."""
    by_stream: dict[str, list[tuple[Group, Values]]] = {}
    for group in groups:
        values = measured_values(group, rows)
        by_stream.setdefault(group.stream, []).append((group, values))
    rankings = {}
    for stream, pairs in by_stream.items():
        best = best_means([values for _, values in pairs])
        standings = [standing(group, values, best) for group, values in pairs]
        standings.sort(key=lambda one: -mean_of(one.values["faa"], -1.0))
        rankings[stream] = with_tests(standings, rows)
    return rankings


def with_tests(standings: Sequence[Standing], rows: Mapping[int, Mapping[str, Any]]) -> list[Standing]:
    """Tests each group against the first."""
    by_seed = [faa_by_seed(one.group, rows) for one in standings]
    tested = holm([p_against(by_seed[0], other) for other in by_seed[1:]])
    return [replace(one, p=p) for one, p in zip(standings, [None, *tested], strict=True)]


def faa_by_seed(group: Group, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    found = {run.config["seed"]: rows[id(run)]["faa"] for run in group.runs}
    return {seed: value for seed, value in found.items() if value is not None}


def measured_values(group: Group, rows: Mapping[int, Mapping[str, Any]]) -> Values:
    """Mean and deviation over the seeds of a group, by the names of MEASURED."""
    measured = []
    for run in group.runs:
        row = dict(rows[id(run)])
        measured.append(dict.fromkeys(OCCASIONAL) | row | explanations(run))
    return {name: spread([row[name] for row in measured]) for name in MEASURED}


def standing(group: Group, values: Values, best: Mapping[str, float]) -> Standing:
    is_best = set()
    for name, best_mean in best.items():
        value = values[name]
        if value is not None and value.mean == best_mean:
            is_best.add(name)
    return Standing(group, values, frozenset(is_best))


def best_means(rows: Sequence[Mapping[str, Spread | None]]) -> dict[str, float]:
    """The best mean of each value that can be better; nothing where all are equal or there is one row."""
    best = {}
    for name, sign in BETTER.items():
        means = [found.mean for row in rows if (found := row[name]) is not None]
        if len(set(means)) > 1:
            best[name] = sign * max(sign * mean for mean in means)
    return best


def mean_of(value: Spread | None, otherwise: float) -> float:
    return otherwise if value is None else value.mean


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and deviation of the values of all seeds; None if one of them is unknown."""
    known = [float(value) for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    deviation = stdev(known) if len(known) > 1 else None
    return Spread(fmean(known), deviation)


def explanations(run: Run) -> dict[str, float | None]:
    """What was measured to explain a result: the ridge probes, in percent, and the alignment of the memory."""
    if isinstance(run, StoredRun):
        return {name: run.values[name] for name in ("probe_warm", "probe_end", "centred")}
    found: dict[str, float | None] = {"probe_warm": None, "probe_end": None}
    try:
        text = (run.path / "diagnostics.json").read_text(encoding="utf-8")
        diagnostics = json.loads(text)
        found["probe_warm"] = float(diagnostics["probe_warm"]["ridge"])
        found["probe_end"] = float(diagnostics["probe_final"]["ridge"])
    except (OSError, ValueError, LookupError, TypeError):
        pass  # `profcil diagnose` was not run
    return found | {"centred": final_centred(run)}


def final_centred(run: Run) -> float | None:
    """The alignment after the last position; None if the method stores no means or the folder has no events."""
    if not (run.path / "events.jsonl").exists():
        return None
    memory = run.final_alignment().get("memory", {})
    return memory.get("centred")
