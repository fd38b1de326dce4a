"""A run folder as it can be read by anyone: plain files, no torch, nothing trusted that the files do not say."""

from __future__ import annotations

import fcntl
import json
import math
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from profcil.errors import RunFolderError
from profcil.metrics.client_first import summary
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.plan import Plan
from profcil.runs.settings_check import check_settings, flat

Made = TypeVar("Made")
NAMES = ("dataset", "method", "setting", "seed")
ELSEWHERE = ("device", "threads", "workers", "accelerate")  # settings of where a run is computed; these may change
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)  # TOML, JSON, UTF-8: ValueErrors


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    path: Path
    config: dict[str, Any]
    facts: dict[str, Any]  # run.json: times, memory, environment, whether it is done
    scores: Scores
    ledger: Ledger
    plan: Plan

    @property
    def done(self) -> bool:
        return self.facts["done"]

    @property
    def metrics(self) -> dict[str, float] | None:
        """FAA, CTA and AF in percent, worked out anew from scores and plan; None before the end."""
        return summary(self.scores.correct, self.scores.total, self.plan.orders) if self.done else None

    def bytes(self, direction: str) -> int:
        """What the incremental stream sent one way; the warm-up is common to all methods and left out."""
        return self.ledger.total(direction=direction) - self.ledger.total(direction=direction, stage="warmup")


def load_run(path: str | Path) -> Run:
    """Reads a run folder; whatever is missing or broken in it is one sentence."""
    path = Path(path)
    check_folder(path)
    run = Run(
        path,
        config=read(path / "config.toml", tomllib.loads),
        facts=read(path / "run.json", table),
        scores=read(path / "scores.json", lambda text: Scores.from_json(json.loads(text))),
        ledger=read(path / "ledger.csv", Ledger.from_csv),
        plan=Plan.load(path / "plan.npz"),
    )
    check(run)
    return run


def held(lock: Path) -> bool:
    """Whether a process holds the folder now."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def check_folder(path: Path) -> None:
    """A run folder has a config.toml, and may be looked into."""
    with readable(path):
        if not (path / "config.toml").is_file():
            what = "is a file, not a run folder" if path.is_file() else "does not exist"
            what = "is not a run folder (it has no config.toml)" if path.is_dir() else what
            raise RunFolderError(f"{path} {what}; give a folder that `profcil run` named")


def read(path: Path, make: Callable[[str], Made]) -> Made:
    """What `make` makes of a file's text."""
    with readable(path):
        try:
            return make(path.read_text(encoding="utf-8"))
        except RunFolderError as error:  # of what is in the file
            raise ValueError(str(error)) from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file, or a folder, is one sentence that says what to do."""
    try:
        yield
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or (f"no {error}" if isinstance(error, KeyError) else error)
        raise RunFolderError(f"{path} cannot be read ({reason}); {remedy(path, error)}") from None


def remedy(path: Path, error: BaseException) -> str:
    if isinstance(error, PermissionError):
        return "let yourself read it, or leave this run out"
    if path.name == "config.toml":
        return "put back what it was, or leave this run out"
    return advice(path.parent)


def table(text: str) -> dict[str, Any]:
    """A JSON file that is a table of names and values."""
    if not isinstance(values := json.loads(text), dict):
        raise ValueError("it is not a table of names and values")
    return values


def check(run: Run) -> None:
    """The files name the run, agree on what it is, and a run that says it is done has all its scores."""
    tasks = run.plan.positions
    named = all(name in run.config for name in NAMES) and "done" in run.facts
    same_plan = run.facts.get("plan", run.plan.digest) == run.plan.digest
    shapes = run.scores.correct.shape, run.scores.total.shape
    if not named or not same_plan or shapes != ((tasks, tasks), (tasks,)):
        raise RunFolderError(f"the files in {run.path} do not belong together; {advice(run.path)}")
    with readable(run.path / "run.json"):
        began = {k: v for k, v in run.facts.get("config", {}).items() if k not in ELSEWHERE}
    check_settings(run.path, began, flat(run.config))
    if run.done and (run.scores.correct[-1] < 0).any():
        raise RunFolderError(f"{run.path} says it is done but lacks scores; {advice(run.path)}")


def advice(path: Path) -> str:
    return (
        f"`profcil resume {path}` writes the readable files anew if the saved state is whole, else leave this run out"
    )


def row(run: Run) -> dict[str, Any]:
    """One run as plain values; None is what is unknown, and everything measured is unknown before the end."""
    values = {name: run.config[name] for name in ("method", "dataset", "setting", "seed")}
    metrics = run.metrics or {}
    measured = {
        "faa": metrics.get("faa"),
        "cta": metrics.get("cta"),
        "af": metrics.get("af"),
        "bytes_down": run.bytes("down"),
        "bytes_up": run.bytes("up"),
        "norm_comm": None,  # a relation between runs; `tables.compare` knows it
        **{name: run.facts.get(name) for name in ("seconds", "warmup_seconds", "peak_memory_mb")},
        **{name: run.facts.get(name) for name in ("server_memory_bytes", "client_extra_bytes")},
    }
    known = {key: known_number(value) if run.done else None for key, value in measured.items()}
    return {**values, **known, "done": run.done, "path": str(run.path)}


def known_number(value: Any) -> Any:
    """NaN is no value, and no JSON either."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def alignments(path: Path) -> list[dict[str, Any]]:
    """What the run itself noted after every position."""
    return read(path / "events.jsonl", lambda text: [dict(e.get("alignment", {})) for e in positions(text)])


def positions(text: str) -> list[dict[str, Any]]:
    return [e for e in map(event, text.splitlines()) if e["event"] == "position"]


def event(line: str) -> dict[str, Any]:
    """One line of events.jsonl."""
    if "event" not in (noted := table(line)):
        raise ValueError("a line of it names no event")
    return noted


def at_the_end(path: Path) -> dict[str, Any]:
    """What it noted after the last position; nothing where no class was old by then."""
    return next(reversed(alignments(path)), {})
