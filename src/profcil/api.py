"""Runs from Python: the same as `profcil run` and `profcil resume`, with the finished run as the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.resolve import RunConfig, resolve
from profcil.runs.reader import Run, load_run

if TYPE_CHECKING:
    from profcil.data.bundle import Bundle
    from profcil.engine.run import Progress


def run(
    recipe: str | None = None,
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observe: Callable[[Progress], None] = lambda p: None,
    **flags: Any,
) -> Run:
    """Learns a dataset with a method and returns the finished run.

    `recipe` and `flags` (dataset, method, setting, seed, preset, device, ...) are those of `profcil run`. `settings`
    are those of `--set`, for example {"train.lr": 0.01, "noise": 0.2}. `out` is the run folder, by default a new one
    under runs/. `data` is the folder of the datasets, by default $PROFCIL_DATA or data. `observe` is called after every
    round.
    """
    from profcil.engine.run import start

    config = resolve(recipe, flags, settings or {})
    path = Path(out) if out is not None else default_folder(config)
    return load_run(start(config, path, data_root(data), observe))


def resume(
    path: str | Path, *, data: str | Path | None = None, observe: Callable[[Progress], None] = lambda p: None
) -> Run:
    """Continues a stopped run and returns the finished run."""
    from profcil.engine import run as engine

    return load_run(engine.resume(Path(path), Path(data) if data is not None else None, observe))


def load_data(dataset: str, *, data: str | Path | None = None, seed: int = 0) -> Bundle:
    """A dataset: training and test examples, class names and facts. `seed` draws a split that is not official."""
    from profcil.data.loading import load_bundle

    return load_bundle(dataset, data_root(data), seed)


def data_root(given: str | Path | None) -> Path:
    """The folder of the datasets."""
    return Path(given or os.environ.get("PROFCIL_DATA") or "data")


def default_folder(config: RunConfig) -> Path:
    """The default folder of a run, with a number if it contains a run already."""
    name = f"{config.dataset}-{config.setting}-{config.method}-seed{config.seed}"
    path = Path("runs") / name
    number = 1
    while (path / "config.toml").exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
