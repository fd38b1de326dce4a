"""Follows the runs in folders: their state now, and the data of the page about those that are not being computed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from profcil.errors import RunFolderError
from profcil.live.state import describe_folder
from profcil.reporting.groups import run_labels
from profcil.reporting.page.data import page_data
from profcil.reporting.page.page import fill_page, page_policy
from profcil.runs.gather import is_run_folder
from profcil.runs.reader import Run, load_run

DEPTH = 3  # folders below a given one that are searched for runs
WATCHED = ("config.toml", "events.jsonl", "run.json")  # a run is read again if one of them has changed
Stamp = tuple[int, ...]


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, which its label is made from."""

    config: dict[str, Any]


class Watcher:
    """Reads a run only if its files have changed since."""

    def __init__(self, folders: Sequence[Path], title: str = "profcil runs") -> None:
        self.roots = list(folders)
        self.title = title
        self.described: dict[Path, tuple[Stamp, dict[str, Any]]] = {}
        self.page: tuple[str, dict[str, Any]] = ("", {})  # the data of the page and its version
        self.reading = Lock()
        self.collecting = Lock()

    def live(self) -> dict[str, Any]:
        """The state of all runs, the version of the page's data, and the time."""
        with self.reading:
            found = [(path, self.describe(path)) for path in self.folders()]
        runs = [{"path": str(path), "name": path.name, **state} for path, state in found]
        add_labels(runs)
        described = [{key: value for key, value in run.items() if key != "config"} for run in runs]
        return {"runs": described, "version": version_of(runs), "time": time.time()}

    def folders(self) -> list[Path]:
        return [path for root in self.roots for path in run_folders_below(root, DEPTH)]

    def describe(self, path: Path) -> dict[str, Any]:
        """The state of one run. Whether a process holds its lock is looked at every time."""
        stamp = stamp_of(path)
        before = self.described.get(path)
        if before is not None and before[0] == stamp and before[1]["state"] in ("done", "unreadable"):
            return before[1]
        state = describe_folder(path) | {"changed": stamp[0] / 1e9}
        self.described[path] = (stamp, state)
        return state

    def data(self) -> dict[str, Any]:
        """The data of the page about all runs that no process computes, with its version."""
        with self.collecting:
            live = self.live()
            if self.page[0] != live["version"]:
                paths = [Path(run["path"]) for run in live["runs"] if run["state"] in ("done", "stopped")]
                runs, notes = load_readable(paths)
                notes += [run["reason"] for run in live["runs"] if run["state"] == "unreadable"]
                self.page = (live["version"], page_data(runs, notes) | {"version": live["version"]})
            return self.page[1]

    def html(self) -> str:
        return fill_page(self.data(), self.title, live=self.live())

    def policy(self) -> str:
        return page_policy(is_live=True)


def run_folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """The run folders at or below a folder. Hidden folders and the inside of run folders are not searched."""
    if is_run_folder(folder):
        yield folder
        return
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:  # removed meanwhile, or not allowed
        return
    if depth:
        for path in inner:
            yield from run_folders_below(path, depth - 1)


def stamp_of(path: Path) -> Stamp:
    """Times and sizes of the files that change; the latest time first."""
    times = []
    sizes = []
    for name in WATCHED:
        try:
            found = (path / name).stat()
        except OSError:
            continue
        times.append(found.st_mtime_ns)
        sizes.append(found.st_size)
    return (max(times, default=0), *times, *sizes)


def add_labels(runs: Sequence[dict[str, Any]]) -> None:
    """Adds the label of each readable run: its method and the settings that distinguish it."""
    readable = [run for run in runs if "config" in run]
    labels = run_labels([RunSettings(run["config"]) for run in readable])
    for run, label in zip(readable, labels, strict=True):
        run["label"] = label


def version_of(runs: Sequence[dict[str, Any]]) -> str:
    """A text that changes when the page's data does."""
    shown = [(run["path"], run["state"], run["changed"]) for run in runs if run["state"] != "running"]
    return hashlib.blake2b(json.dumps(shown).encode(), digest_size=8).hexdigest()


def load_readable(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and a sentence about each other one that has saved something."""
    runs = []
    notes = []
    for path in paths:
        if not (path / "run.json").exists():
            continue
        try:
            run = load_run(path)
            run.alignments()  # the page reads the events, too: a run without them must not hide the others
            runs.append(run)
        except RunFolderError as error:
            notes.append(f"left out: {error}")
    return runs, notes
