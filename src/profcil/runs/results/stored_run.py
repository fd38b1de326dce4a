"""One run as a row of a results store, and a row as a run that tables and figures can use.

A row holds what reporting needs of a run folder, without weights and samples. Its digest covers settings, scores and
traffic; reading checks it, so a number that was edited is noticed. A row that was imported from an older table has no
digest, and its unknown cells are empty.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from profcil.errors import StoreError
from profcil.metrics.ledger import Entry, Ledger
from profcil.metrics.scores import Scores
from profcil.runs.reader import Run, describe_execution, finite_or_none
from profcil.runs.results.stored_settings import (
    apply_differences,
    canonical_json,
    comparable_settings,
    describe_differences,
    hash_recipe,
    nest_settings,
)

TEXT = "text"
COUNT = "a whole number"
NUMBER = "a number"
JSON = "JSON"
COLUMNS = {
    "dataset": TEXT,
    "method": TEXT,
    "setting": TEXT,
    "seed": COUNT,
    "part": TEXT,  # the evaluated part of the dataset: test or validation
    "settings": TEXT,  # those that differ from the recipe
    "faa": NUMBER,
    "cta": NUMBER,
    "af": NUMBER,
    "bytes_total": COUNT,  # of the stream, without the warm-up
    "bytes_down": COUNT,
    "bytes_up": COUNT,
    "align": NUMBER,  # memory and true class means after the last position
    "centred": NUMBER,
    "align_adapted": NUMBER,
    "probe_warm": NUMBER,
    "probe_end": NUMBER,
    "seconds": NUMBER,  # of the stream
    "warmup_seconds": NUMBER,
    "dictionary_seconds": NUMBER,
    "peak_memory_mb": NUMBER,
    "server_memory_bytes": COUNT,
    "client_extra_bytes": COUNT,
    "device": TEXT,
    "machine": TEXT,  # the GPU, or the processor
    "profcil": TEXT,
    "torch": TEXT,
    "python": TEXT,
    "execution": TEXT,
    "date": TEXT,
    "origin": TEXT,  # run or imported
    "recipe": TEXT,  # which recipe of the store `settings` refers to
    "plan": TEXT,
    "data": TEXT,
    "scores": JSON,  # correct [position][task], total [task], and the curves of seen and current accuracy
    "bytes": JSON,  # by stage, direction and kind
    "centred_by_position": JSON,
    "digest": TEXT,
}
PARSERS: dict[str, Callable[[str], Any]] = {COUNT: int, NUMBER: float, JSON: json.loads}
KEY = ("dataset", "method", "setting", "seed", "part", "settings", "profcil", "execution")
FACTS = ("seconds", "warmup_seconds", "dictionary_seconds", "peak_memory_mb")
MEMORY = ("server_memory_bytes", "client_extra_bytes")
FIXED = {"part": ("test", "validation"), "setting": ("severe", "homogeneous"), "origin": ("run", "imported")}
OF_A_RUN = ("faa", "cta", "af", "bytes_total", "scores", "bytes", "digest")  # empty in imported rows only
Row = dict[str, str]  # the cells of a row by column


@dataclass(frozen=True, repr=False)
class StoredRun(Run):
    """A finished run that is known by its row in a store. `path` is the file and a name for the row."""

    values: dict[str, Any]  # the parsed cells; None for an empty one

    @property
    def metrics(self) -> dict[str, float] | None:
        return {name: self.values[name] for name in ("faa", "cta", "af")}

    @property
    def further_metrics(self) -> dict[str, float | None]:
        return {}  # they need the plan, which a store does not have

    @property
    def has_scores(self) -> bool:
        """Whether the scores of every task are known; not of an imported row."""
        return self.values["scores"] is not None

    def bytes(self, direction: str) -> int | None:
        return self.values[f"bytes_{direction}"]

    def bytes_total(self) -> int | None:
        return self.values["bytes_total"]

    def seen_accuracy(self) -> np.ndarray:
        return curve(self.values["scores"]["seen"])

    def current_accuracy(self) -> np.ndarray:
        return curve(self.values["scores"]["current"])

    def alignments(self) -> list[dict[str, Any]]:
        centred = self.values["centred_by_position"] or []
        return [{"memory": {"centred": value}} if value is not None else {} for value in centred]

    def final_alignment(self) -> dict[str, Any]:
        memory = {name: self.values[name] for name in ("align", "centred")}
        return {"memory": memory, "adapted": {"align": self.values["align_adapted"]}}


def row_of_run(run: Run, recipe: Mapping[str, Any]) -> Row:
    """The row of a finished run; `recipe` has the settings that its row is compared with."""
    config = run.config
    values: dict[str, Any] = {name: config[name] for name in ("dataset", "method", "setting", "seed")}
    values["part"] = config.get("evaluate", "test")
    values["settings"] = describe_differences(comparable_settings(config), recipe)
    values |= run.metrics or {}
    values |= {"bytes_total": run.bytes_total(), "bytes_down": run.bytes("down"), "bytes_up": run.bytes("up")}
    values |= alignment_values(run)
    values |= probe_values(run)
    values |= {name: run.facts.get(name) for name in (*FACTS, *MEMORY)}
    values |= machine_values(run)
    values |= {"origin": "run", "recipe": hash_recipe(recipe)}
    values |= {"plan": run.facts.get("plan"), "data": run.facts.get("data")}
    values["scores"] = run.scores.to_json() | {
        "seen": plain_curve(run.seen_accuracy()),
        "current": plain_curve(run.current_accuracy()),
    }
    values["bytes"] = traffic_by_stage(run.ledger)
    values["digest"] = digest_of(comparable_settings(config), values)
    return {column: format_cell(values.get(column), kind) for column, kind in COLUMNS.items()}


def alignment_values(run: Run) -> dict[str, Any]:
    """The alignment at the end and by position; empty if the folder has no events."""
    if not (run.path / "events.jsonl").exists():
        return {}
    final = run.final_alignment()
    memory = final.get("memory", {})
    centred = [entry.get("memory", {}).get("centred") for entry in run.alignments()]
    return {
        "align": memory.get("align"),
        "centred": memory.get("centred"),
        "align_adapted": final.get("adapted", {}).get("align"),
        "centred_by_position": centred if any(value is not None for value in centred) else None,
    }


def probe_values(run: Run) -> dict[str, Any]:
    """The ridge probes of `profcil diagnose`; empty if it was not run."""
    try:
        found = json.loads((run.path / "diagnostics.json").read_text(encoding="utf-8"))
        return {"probe_warm": found["probe_warm"]["ridge"], "probe_end": found["probe_final"]["ridge"]}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def machine_values(run: Run) -> dict[str, Any]:
    """Where, when and with which software a run was computed, as far as its folder says it."""
    environment = run.facts.get("environment") or {}
    processes = run.facts.get("execution") or [{}]
    configured, _, _ = str(run.config.get("device", "")).partition(":")
    values = {"device": processes[-1].get("device") or configured}
    values["machine"] = environment.get("gpu") or environment.get("processor")
    values["profcil"] = run.facts.get("version")
    values["torch"] = environment.get("torch")
    values["python"] = environment.get("python")
    values["execution"] = describe_execution(processes)
    values["date"] = run.facts.get("date")
    return values


def traffic_by_stage(ledger: Ledger) -> dict[str, Any]:
    """Bytes by stage, direction and kind."""
    nested: dict[str, Any] = {}
    for (stage, direction, kind), count in ledger.by("stage", "direction", "kind").items():
        nested.setdefault(stage, {}).setdefault(direction, {})[kind] = count
    return nested


def digest_of(settings: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """A hash of settings, scores and traffic: equal runs have equal digests. Metrics count with six decimals, because
    their last bits depend on numpy."""
    names = {name: values[name] for name in ("dataset", "method", "setting", "seed", "part")}
    counts = {name: values["scores"][name] for name in ("correct", "total")}
    metrics = [f"{values[name]:.6f}" for name in ("faa", "cta", "af")]
    text = canonical_json([names, dict(settings), counts, metrics, values["bytes"]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def format_cell(value: Any, kind: str) -> str:
    """A value as the text of a cell."""
    value = finite_or_none(value)
    if value is None:
        return ""
    if kind == JSON:
        return canonical_json(value)
    return repr(float(value)) if kind == NUMBER else str(value)


def parse_row(row: Row, where: str, recipes: Mapping[str, Mapping[str, Any]], file: Path) -> StoredRun:
    """The run of a row. `where` names the row in messages, `recipes` are those of the store by their hash."""
    values = {column: parse_cell(row[column], column, where) for column in COLUMNS}
    check_cells(values, where)
    if row["recipe"] not in recipes:
        raise damaged(where, f"the store has no recipe '{row['recipe']}'")
    try:
        settings = apply_differences(recipes[row["recipe"]], row["settings"])
    except ValueError as error:
        raise damaged(where, f"settings cannot be read ({error})") from None
    if values["origin"] == "run":
        check_run(values, settings, where)
    name = f"{row['dataset']}-{row['setting']}-{row['method']}-seed{row['seed']}"
    path = file / f"{name}-{row['digest'][:16] or 'imported'}"
    scores = Scores.from_json(values["scores"] or {"correct": [], "total": []})
    plan: Any = SimpleNamespace(digest=row["plan"], positions=len(scores.correct))  # a store has no plan
    return StoredRun(path, config_of(values, settings), facts_of(values), scores, ledger_of(values), plan, values)


def parse_cell(text: str, column: str, where: str) -> Any:
    """The value of a cell; None if it is empty."""
    kind = COLUMNS[column]
    if kind == TEXT:
        return text
    if not text:
        return None
    try:
        value = PARSERS[kind](text)
        if kind == NUMBER and not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise damaged(where, f"{column} is '{text[:40]}', allowed is {kind}") from None
    return value


def check_cells(values: Mapping[str, Any], where: str) -> None:
    """Refuses a row without names or results, and texts that are not allowed."""
    for column, allowed in FIXED.items():
        if values[column] not in allowed:
            raise damaged(where, f"{column} is '{values[column]}', allowed is {' or '.join(allowed)}")
    for column in ("dataset", "method", "seed", "faa", "profcil"):
        if values[column] in (None, ""):
            raise damaged(where, f"{column} is empty")


def check_run(values: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """Refuses a row whose cells do not have its digest, or that lacks what only an imported row may lack."""
    missing = [column for column in OF_A_RUN if values[column] in (None, "")]
    if missing:
        raise damaged(where, f"{missing[0]} is empty")
    try:
        is_same = digest_of(settings, values) == values["digest"]
        ends = [values["scores"]["seen"][-1], fmean_of(values["scores"]["current"])]
    except (LookupError, TypeError):
        raise damaged(where, "scores lack correct, total, seen or current") from None
    if not is_same:
        raise damaged(where, "settings, scores and bytes do not have the digest of the row")
    for name, end in zip(("faa", "cta"), ends, strict=True):
        if end is not None and not math.isclose(end, values[name], abs_tol=1e-6):
            raise damaged(where, f"{name} is {values[name]}, but the scores give {end}")
    if sum(stream_counts(values["bytes"])) != values["bytes_total"]:
        raise damaged(where, "bytes_total is not the sum of bytes")


def fmean_of(values: list[float | None]) -> float | None:
    """The mean; None if a value is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.fsum(known) / len(known)


def stream_counts(traffic: Mapping[str, Any]) -> list[int]:
    """All byte counts of the stream, without the warm-up."""
    stages = [directions for stage, directions in traffic.items() if stage != "warmup"]
    return [count for directions in stages for kinds in directions.values() for count in kinds.values()]


def damaged(where: str, what: str) -> StoreError:
    return StoreError(f"{where}: {what}; restore the file, or remove the row and add its run again")


def config_of(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the form of a config.toml. Threads and workers are not known."""
    names = {name: values[name] for name in ("dataset", "method", "setting", "seed")}
    more = {"evaluate": values["part"], "device": values["device"] or "cpu", "keep_memories": False}
    return names | more | nest_settings(settings)


def facts_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json would say."""
    environment = {name: values[name] for name in ("machine", "torch", "python", "date") if values[name]}
    facts = {name: values[name] for name in (*FACTS, *MEMORY, "plan", "data")}
    execution = [{"path": values["execution"]}] if values["execution"] else []
    return facts | {"done": True, "version": values["profcil"], "environment": environment, "execution": execution}


def ledger_of(values: Mapping[str, Any]) -> Ledger:
    """The traffic as a ledger without positions, rounds and clients."""
    entries = []
    for stage, directions in (values["bytes"] or {}).items():
        for direction, kinds in directions.items():
            for kind, count in kinds.items():
                entries.append(Entry(stage, -1, -1, -1, direction, kind, count))
    return Ledger(entries)


def plain_curve(values: np.ndarray) -> list[float | None]:
    return [finite_or_none(float(value)) for value in values]


def curve(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def row_key(row: Row) -> tuple[str, ...]:
    """What distinguishes rows of a store. Two rows with one key must be of equal runs."""
    return tuple(row[column] for column in KEY)
