"""Tables over runs, as plain rows and as text."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from profcil.runs.reader import Run, summarise_run
from profcil.runs.settings_check import SEED_AND_MACHINE

RESULT_COLUMNS = {
    "faa": "FAA",
    "cta": "CTA",
    "af": "AF",
    "bytes_down": "MB down",
    "bytes_up": "MB up",
    "seconds": "seconds",
}
MEASURED = {
    "faa": "FAA",
    "cta": "CTA",
    "af": "AF",
    "norm_comm": "NormComm",
    "bytes_down": "MB down",
    "bytes_up": "MB up",
    "seconds": "seconds",
    "warmup_seconds": "warm-up s",
    "peak_memory_mb": "peak MB",
}
NAMES = {"method": "method", "dataset": "dataset", "setting": "setting", "seed": "seed"}
FOLD = 24  # columns up to this many characters are never folded


def compare(runs: Sequence[Run], reference: str = "fedavg") -> list[dict[str, Any]]:
    """A row per run, in the order given, with NormComm against the reference method among them."""
    rows = [summarise_run(run) for run in runs]
    peers = [(run, r) for run, r in zip(runs, rows, strict=True) if r["done"] and r["method"] == reference]
    return [{**r, "norm_comm": relative(run, r, peers)} for run, r in zip(runs, rows, strict=True)]


def relative(run: Run, one: Mapping[str, Any], peers: Sequence[tuple[Run, dict[str, Any]]]) -> float | None:
    """NormComm: against the reference's run of the same stream and seed, else its mean over seeds, else unknown."""
    same = [r for other, r in peers if protocol(other) == protocol(run)]
    same = [r for r in same if r["seed"] == one["seed"]] or same
    mean = fmean(map(traffic, same)) if same else 0
    return traffic(one) / mean if one["done"] and mean else None


def protocol(run: Run) -> tuple[Any, ...]:
    """What two runs must share for their traffic to be comparable; the accounting of `transfer` need not be."""
    c = run.config
    sizes = {k: v for k, v in c["model"].items() if k not in ("head", "precision")}
    return (c["dataset"], c["setting"], c["stream"], c["train"]["rounds"], sizes)


def traffic(r: Mapping[str, Any]) -> int:
    return r["bytes_down"] + r["bytes_up"]


def render(runs: Sequence[Run], reference: str = "fedavg") -> str:
    """The comparison as text: every run, then mean ± sample standard deviation where there are several seeds."""
    rows = compare(runs, reference)
    columns = NAMES | MEASURED
    lines = [format_row(r, columns) for r in rows]
    return text_table(list(columns.values()), [*lines, *(spread(group) for group in seed_groups(runs, rows))])


def seed_groups(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Finished runs that differ in nothing but the seed, where there are at least two seeds."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for run, r in zip(runs, rows, strict=True):
        if r["done"]:
            same = {k: v for k, v in run.config.items() if k not in SEED_AND_MACHINE}
            groups.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(r["seed"], r)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def spread(group: Sequence[Mapping[str, Any]]) -> list[str]:
    """The row under several seeds of one method; a number that one of them lacks is not averaged over the rest."""
    first, out = group[0], []
    for key in MEASURED:
        values = [r[key] for r in group]
        known = all(v is not None for v in values)
        out.append(f"{figure(key, fmean(values))} ± {figure(key, stdev(values))}" if known else "-")
    return [first["method"], first["dataset"], first["setting"], f"mean of {len(group)}", *out]


def format_row(r: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """A row's texts; an unfinished run says so where its first number would be."""
    texts = [figure(key, r[key]) for key in columns]
    if not r["done"]:
        texts[list(columns).index("faa")] = "unfinished"
    return texts


def figure(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.startswith("bytes"):
        return f"{value / 1e6:.2f}"
    return f"{value:.3f}" if key == "norm_comm" else f"{value:.2f}" if isinstance(value, float) else str(value)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side: long texts fold to a terminal's width, nothing is cut, a pipe gets whole lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    wide = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    least = [min(width, FOLD) for width in wide]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, width in zip(header, least, strict=True):
        table.add_column(Text(name), overflow="fold", min_width=width)
    for texts in rows:
        table.add_row(*map(Text, texts))
    room = Console().width if sys.stdout.isatty() else sum(wide) + 2 * len(wide)
    console = Console(file=io.StringIO(), color_system=None, width=max(room, sum(least) + 2 * len(least)))
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
