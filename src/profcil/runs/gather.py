"""From paths to runs, and from runs to groups that share everything but the seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError
from profcil.reporting.tables import FREE
from profcil.runs.reader import Run, load_run, readable
from profcil.runs.settings_check import flat


@dataclass(frozen=True)
class Group:
    """Finished runs of one method that differ in nothing but the seed."""

    stream: str  # dataset and setting: what a panel shows
    label: str  # method, and what sets it apart from other runs of the method in the same panel
    runs: tuple[Run, ...]


def folders(paths: Iterable[str | Path]) -> list[Path]:
    """Every run folder meant: one itself, or those that lie directly in a folder that is none, such as a study's. Files
    that a pattern has given along with folders are passed over."""
    found: list[Path] = []
    given = [Path(path) for path in paths]
    for path in [path for path in given if not path.is_file()] or given:
        with readable(path):
            own = not path.is_dir() or is_run(path)
            inside = [] if own else sorted(p for p in path.iterdir() if p.is_dir() and is_run(p))
        found += inside or [path]
    return list(dict.fromkeys(found))


def is_run(path: Path) -> bool:
    """Whether it is a run folder; one that may not be looked into counts, so that whoever reads it says so."""
    try:
        return (path / "config.toml").is_file()
    except PermissionError:
        return True


def load_all(paths: Iterable[str | Path], tell: Callable[[str], None]) -> list[Run]:
    """The readable runs; each of the others is a sentence to the reader. None at all is an error."""
    given, runs = folders(paths), []
    for path in given:
        try:
            runs.append(load_run(path))
        except RunFolderError as error:
            if len(given) == 1:
                raise
            tell(f"left out: {error}")
    if not runs:
        raise RunFolderError(f"none of the {len(given)} folders given is a readable run; give folders of `profcil run`")
    return runs


def finished(runs: Sequence[Run], tell: Callable[[str], None]) -> list[Run]:
    """The runs that have ended; each of the others is a sentence to the reader."""
    for run in runs:
        if not run.done:
            tell(f"left out: {run.path} is not finished; go on with `profcil resume {run.path}`")
    done = [run for run in runs if run.done]
    if not done:
        raise RunFolderError("none of the runs given is finished; go on with them by `profcil resume RUN`")
    return done


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The groups, in the order in which their first runs were given; one seed counts once."""
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        same = {k: v for k, v in run.config.items() if k not in FREE}
        groups.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(run.config["seed"], run)
    members = [tuple(group[seed] for seed in sorted(group)) for group in groups.values()]
    return [Group(stream_of(m[0]), label_of(m[0], [o[0] for o in members]), m) for m in members]


def stream_of(run: Run) -> str:
    return f"{run.config['dataset']}, {run.config['setting']}"


def told(config: dict[str, Any], numbered: bool) -> dict[str, Any]:
    """Every setting as a label would name it; a weak task is its strength, and its number where these differ."""
    out = flat(config)
    task, strength = (out.pop(f"stream.{key}", None) for key in ("weak_task", "weak_strength"))
    if task is None:
        return out
    return out | {"weak": "none" if task < 0 else f"{strength}, task {task}" if numbered else strength}


def label_of(run: Run, others: Sequence[Run]) -> str:
    """The method; where it has namesakes in the same stream also the settings that tell it from each of them, and
    how many more settings differ: `promax (noise=0.1, +2)`."""
    method = run.config["method"]
    near = [o.config for o in others if o.config["method"] == method and stream_of(o) == stream_of(run)]
    numbered = len({c["stream"].get("weak_task", -1) for c in near} - {-1}) > 1
    own, peers = told(run.config, numbered), [told(c, numbered) for c in near]
    apart = [k for k, v in own.items() if k not in FREE and any(p.get(k) != v for p in peers)]
    named: list[str] = []
    left = peers
    for key in apart:
        rest = [p for p in left if p.get(key) == own[key]]
        if len(rest) < len(left):
            named, left = [*named, key], rest
    more = [f"+{len(apart) - len(named)}"] * (len(apart) > len(named))
    texts = [f"{key.split('.')[-1]}={own[key]}" for key in named] + more
    return f"{method} ({', '.join(texts)})" if texts else method
