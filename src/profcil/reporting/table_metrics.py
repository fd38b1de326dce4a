"""The metrics of tables: their titles, and their values in finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from profcil.reporting.paper import paper_values
from profcil.reporting.tables import compare
from profcil.runs.reader import Run


class Metric(NamedTuple):
    title: str
    digits: int
    better: int  # 1: higher is better, -1: lower is better, 0: neither


METRICS = {
    "comm": Metric("NormComm", 3, -1),
    "faa": Metric("FAA", 2, 1),
    "cta": Metric("CTA", 2, 1),
    "af": Metric("AF", 2, -1),
    "weak_accuracy": Metric("A post", 2, 1),
    "mmd2": Metric("MMD²", 3, -1),
    "w1": Metric("W1", 3, -1),
    "cosine": Metric("cos. dist.", 3, -1),
    "drop": Metric("drop", 2, -1),
    "align": Metric("Align u", 3, 1),
    "align_z": Metric("Align z", 3, 1),
    "centred": Metric("centred u", 3, 1),
    "mb": Metric("MB sent", 2, -1),
    "mb_down": Metric("S→C MB", 2, -1),
    "mb_up": Metric("C→S MB", 2, -1),
    "seconds": Metric("stream s", 1, -1),
    "warmup_seconds": Metric("warm-up s", 1, 0),
    "total_seconds": Metric("total s", 1, -1),
    "peak_memory_mb": Metric("peak MB", 0, -1),
    "server_mb": Metric("server MB", 3, -1),
    "client_mb": Metric("client MB", 3, -1),
}
TESTED = ("faa", "cta", "af")
UNCHANGED = ("faa", "cta", "af", "seconds", "warmup_seconds", "peak_memory_mb")  # named alike in a row of `compare`
IN_MEGABYTES = {  # the names of METRICS, and the bytes in a row of `compare`
    "mb": "bytes_total",
    "mb_down": "bytes_down",
    "mb_up": "bytes_up",
    "server_mb": "server_memory_bytes",
    "client_mb": "client_extra_bytes",
}


def measure_runs(runs: Sequence[Run]) -> list[dict[str, float | None]]:
    """The results of finished runs by the names in METRICS. NormComm compares runs with the same `transfer`."""
    rows: dict[int, dict[str, Any]] = {}
    for transfer in dict.fromkeys(run.config["transfer"] for run in runs):
        same = [i for i, run in enumerate(runs) if run.config["transfer"] == transfer]
        runs_alike = [runs[i] for i in same]
        compared = compare(runs_alike, paper_values()["reference"])
        rows |= dict(zip(same, compared, strict=True))
    return [metric_values(run, rows[i]) for i, run in enumerate(runs)]


def metric_values(run: Run, row: Mapping[str, Any]) -> dict[str, float | None]:
    """The results of one run by the names in METRICS; `row` is its row of `compare`."""
    values = {key: row[key] for key in UNCHANGED}
    values["total_seconds"] = total_seconds(row)
    values["comm"] = row["norm_comm"]
    for name, key in IN_MEGABYTES.items():
        count = row[key]
        values[name] = None if count is None else count / 1e6
    alignment = run.final_alignment()
    memory = alignment.get("memory", {})
    values["align"] = memory.get("align")
    values["centred"] = memory.get("centred")
    adapted = alignment.get("adapted", {})
    values["align_z"] = adapted.get("align")
    return values


def total_seconds(row: Mapping[str, Any]) -> float | None:
    """The seconds of stream and warm-up; None if one of them is unknown."""
    stream = row["seconds"]
    warmup = row["warmup_seconds"]
    if stream is None or warmup is None:
        return None
    return stream + warmup
