"""Reads a run folder: plain files, without torch, and every file is checked."""

from __future__ import annotations

import html
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from profcil.config import OWN
from profcil.errors import ConfigError, DataError, RunFolderError
from profcil.metrics.client_first import (
    accuracy,
    client_accuracy,
    cumulative_accuracy,
    further_summary,
    means_of_known,
    summary,
)
from profcil.metrics.ledger import Ledger, stream_bytes
from profcil.metrics.scores import Scores
from profcil.protocol.plan import Plan
from profcil.registry import short_name
from profcil.runs.run_checks import check_consistency, check_scores, check_unchanged
from profcil.runs.run_files import check_folder, parse_file, parse_json_table, read_alignments

FURTHER = ("worst_client", "client_sd", "bwt", "fwt")  # the names of `further_metrics`


@dataclass(frozen=True, repr=False)
class Run:
    """One run, finished or not. A notebook shows it as a small table."""

    path: Path
    config: dict[str, Any]
    facts: dict[str, Any]  # run.json: times, memory, environment, whether the run is done
    scores: Scores
    ledger: Ledger
    plan: Plan

    def __repr__(self) -> str:
        lines = [f"{name}: {text}" for name, text in self.facts_in_short().items()]
        return "\n  ".join(["profcil.Run", *lines])

    def _repr_html_(self) -> str:
        cells = [(html.escape(name), html.escape(text)) for name, text in self.facts_in_short().items()]
        rows = [f"<tr><th style='text-align:left'>{name}</th><td>{text}</td></tr>" for name, text in cells]
        return f"<table>{''.join(rows)}</table>"

    def facts_in_short(self) -> dict[str, str]:
        """What the run is, how far it got, its metrics and traffic, and its folder; a line each."""
        names = self.config
        scored = self.scored_positions() if len(self.scores.correct) else 0
        state = "finished" if self.done else f"{scored} of {self.positions} positions"
        seconds = self.facts.get("seconds")
        metrics = [f"{name.upper()} {value:.2f}" for name, value in (self.metrics or {}).items()]
        sent = {way: self.bytes(way) for way in ("down", "up")}
        traffic = [f"{count / 1e6:.2f} MB {way}" for way, count in sent.items() if count is not None]
        return {
            "what": f"{names['method']} on {names['dataset']}, {names['setting']}, seed {names['seed']}",
            "progress": state if seconds is None else f"{state}, {seconds:.1f} s",
            "metrics": ", ".join(metrics) or "none before the end",
            "traffic": ", ".join(traffic) or "unknown",
            "folder": str(self.path),
        }

    def to_frame(self) -> Any:
        """The accuracy in percent as a pandas DataFrame: a row per position, a column per task, both from 1.

        NaN if a task is not introduced yet. Needs the package pandas.
        """
        pandas = import_pandas("Run.scores, which has the same numbers as arrays")
        percent = 100 * accuracy(self.scores.correct, self.scores.total)
        rows = pandas.RangeIndex(1, len(percent) + 1, name="position")
        columns = pandas.RangeIndex(1, percent.shape[-1] + 1, name="task")
        return pandas.DataFrame(percent, index=rows, columns=columns)

    @property
    def done(self) -> bool:
        return self.facts["done"]

    @property
    def positions(self) -> int:
        return len(self.scores.correct)

    @property
    def metrics(self) -> dict[str, float] | None:
        """FAA, CTA and AF in percent, computed from scores and plan; None for an unfinished run."""
        return summary(self.scores.correct, self.scores.total, self.plan.orders) if self.done else None

    @property
    def further_metrics(self) -> dict[str, float | None]:
        """The worst client's accuracy, the deviation over clients, and backward and forward transfer, in percent.

        Empty for an unfinished run. docs/metrics.md defines them.
        """
        if not self.done:
            return {}
        sizes = np.array([len(task) for task in self.plan.tasks])
        scores = self.scores
        return further_summary(scores.correct, scores.total, self.plan.orders, self.plan.counts, sizes)

    def client_accuracy(self) -> np.ndarray:
        """The final accuracy of each client on its own mix of tasks, in percent; NaN for a client without examples."""
        return 100 * client_accuracy(self.scores.correct, self.scores.total, self.plan.counts)

    def confusion(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Class names, and how often the run's model predicts each class (column) for a class (row) of test data.

        Needs torch, the run's model and its data.
        """
        from profcil.runs.models.evaluation import evaluate_run

        found = evaluate_run(self.path)
        return found.names, found.confusion.numpy()

    def bytes(self, direction: str) -> int | None:
        """Bytes that the incremental stream sent in one direction; the warm-up, the same for all, is excluded."""
        everything = self.ledger.total(direction=direction)
        warmup = self.ledger.total(direction=direction, stage="warmup")
        return everything - warmup

    def bytes_total(self) -> int | None:
        """Bytes that the incremental stream sent in both directions."""
        return stream_bytes(self.ledger.entries)

    def seen_accuracy(self) -> np.ndarray:
        """The clients' mean accuracy on the tasks they have met, by position, in percent; NaN if not scored yet."""
        out = np.full(self.positions, np.nan)
        for p in range(self.scored_positions()):
            by_client = cumulative_accuracy(self.scores.correct, self.scores.total, self.plan.orders, p)
            has_joined = np.array(self.plan.joined or (0,) * self.plan.clients) <= p
            out[p] = 100 * by_client[has_joined].mean()
        return out

    def current_accuracy(self) -> np.ndarray:
        """CTA at each position in percent; its mean over positions is the CTA of the run. NaN if not scored yet."""
        positions = np.arange(self.positions)
        percent = 100 * accuracy(self.scores.correct, self.scores.total)
        is_known = self.scores.correct[positions[None, :], self.plan.orders] >= 0
        return means_of_known(percent[positions[None, :], self.plan.orders], is_known)

    def scored_positions(self) -> int:
        """The number of positions that have been scored; each of them has introduced at least one task."""
        return int((self.scores.correct >= 0).any(axis=1).sum())

    def alignments(self) -> list[dict[str, Any]]:
        """The alignment values that the run logged after every position."""
        return read_alignments(self.path)

    def final_alignment(self) -> dict[str, Any]:
        """The alignment after the last position; empty if there were no old classes to compare."""
        alignments = self.alignments()
        return alignments[-1] if alignments else {}


def import_pandas(instead: str) -> Any:
    """The package pandas. Without it, an error that names what has the same numbers."""
    if find_spec("pandas") is None:
        raise ConfigError(
            f"to_frame needs pandas, which is not installed; install it with `pip install pandas`, or use {instead}"
        )
    return import_module("pandas")


def load_run(path: str | Path) -> Run:
    """Reads and checks a run folder. A missing or damaged file is a RunFolderError."""
    path = Path(path)
    check_folder(path)
    config = parse_file(path / "config.toml", tomllib.loads)
    facts = parse_file(path / "run.json", parse_json_table)
    check_unchanged(path, facts)
    scores = parse_file(path / "scores.json", lambda text: Scores.from_json(json.loads(text)))
    ledger = parse_file(path / "ledger.csv", Ledger.from_csv if facts.get("done") else growing_ledger)
    plan = read_plan(path / "plan.npz")
    run = Run(path, config=config, facts=facts, scores=scores, ledger=ledger, plan=plan)
    check_consistency(run)
    check_scores(run)
    return run


def read_plan(path: Path) -> Plan:
    """The plan of a run. A damaged one is a RunFolderError, as every other file of a run is."""
    try:
        return Plan.load(path)
    except DataError as error:
        raise RunFolderError(str(error)) from None


def growing_ledger(text: str) -> Ledger:
    """The ledger of a run that is not done. An incomplete last line is left out: it may be being written."""
    return Ledger.from_csv(text[: text.rfind("\n") + 1])


def summarise_run(run: Run) -> dict[str, Any]:
    """One run as plain values. What is unknown is None; an unfinished run has no measured values."""
    names = {name: run.config[name] for name in ("method", "dataset", "setting", "seed")}
    names["method"] = short_name(names["method"])
    names["dataset"] = dataset_title(run.config)
    metrics = run.metrics or {}
    further = run.further_metrics
    measured = {
        "faa": metrics.get("faa"),
        "cta": metrics.get("cta"),
        "af": metrics.get("af"),
        "bytes_down": run.bytes("down"),
        "bytes_up": run.bytes("up"),
        "bytes_total": run.bytes_total(),
        **{name: further.get(name) for name in FURTHER},
        "norm_comm": None,  # relative to another run; `reporting.tables.compare` fills it in
    }
    for name in ("seconds", "warmup_seconds", "peak_memory_mb", "server_memory_bytes", "client_extra_bytes"):
        measured[name] = run.facts.get(name)
    known = {key: finite_or_none(value) if run.done else None for key, value in measured.items()}
    known |= occasional_values(run)
    computed = describe_execution(run.facts.get("execution", []))
    return {**names, **known, "done": run.done, "path": str(run.path), "computed": computed}


def occasional_values(run: Run) -> dict[str, Any]:
    """What some runs have only: the privacy budget that is spent, the replies that were not used, and the simulated
    time. Also of a run that is not finished."""
    found: dict[str, Any] = {}
    if privacy := run.facts.get("privacy"):
        found["epsilon"] = privacy["epsilon"]
    dropped = run.facts.get("tally", {}).get("dropped_replies")
    is_robust = run.config.get("robust", {}).get("aggregation", "mean") != "mean"
    if dropped or is_robust:
        found["dropped"] = int(dropped or 0)
    if "simulated_seconds" in run.facts:
        found["simulated_seconds"] = run.facts["simulated_seconds"]
    return found


def dataset_title(config: Mapping[str, Any]) -> str:
    """The name of the dataset in tables. Own data is called as its file, since several are named `own`."""
    own = config.get(OWN, {}).get("name")
    return f"{OWN} {own}" if config["dataset"] == OWN and own else config["dataset"]


def describe_execution(processes: Any) -> str | None:
    """Which code computed a run, in a few words; several processes where a run was resumed on another machine."""
    if not isinstance(processes, list):
        return None
    texts = []
    for facts in processes:
        tool = facts.get("gpu") or facts.get("compiler")
        parts = [facts.get("path"), facts.get("device"), facts.get("precision"), tool]
        texts.append(" ".join(str(part) for part in parts if part))
    return "; ".join(dict.fromkeys(texts)) or None


def finite_or_none(value: Any) -> Any:
    """The value, or None for NaN and infinity, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
