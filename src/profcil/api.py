"""Runs from Python: the same as `profcil run` and `profcil resume`, with the finished run as the result."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil import registry
from profcil.config import OWN
from profcil.errors import ConfigError, DataError, ProfcilError, ReuseNote, nearest
from profcil.loggers.base import Logger
from profcil.loggers.observer import Given, Observer, log_observer, make_loggers
from profcil.resolve import SECTIONS, TOP_LEVEL, RunConfig, resolve
from profcil.runs.reader import Run, load_run

if TYPE_CHECKING:
    from profcil.data.bundle import Bundle
    from profcil.engine.recorder import Progress

FLAGS = {*TOP_LEVEL, *SECTIONS, "params", "preset", "tasks"}  # keywords that `resolve` takes; a section is a dict


def run(
    recipe: str | None = None,
    *,
    out: str | Path | None = None,
    data: Any = None,
    method: str | type | None = None,
    settings: Mapping[str, Any] | None = None,
    again: bool = False,
    observe: Callable[[Progress], None] = lambda p: None,
    log: Given = (),
    **flags: Any,
) -> Run:
    """Learns a dataset with a method and returns the finished run.

    `recipe` and `flags` (dataset, setting, seed, preset, device, tasks, ...) are those of `profcil run`. `settings` are
    those of `--set`, for example {"train.lr": 0.01, "noise": 0.2}. `out` is the run folder, by default a new one under
    runs/. `observe` is called after every round and position. `log` names loggers, as `--log` does, or has objects of
    `profcil.extend.Logger`.

    If a finished run under runs/, or in `out`, has the same settings, data and code, that run is returned, and a
    ReuseNote (a warning) says so. `again` computes it nevertheless. A method that is given as a class, and data in
    memory, are always computed.

    `method` is a name, a file that defines METHOD, or a subclass of `profcil.extend.Method`.

    `data`, where a recipe or flag names a dataset, is the folder of the datasets, by default $PROFCIL_DATA or data.
    Otherwise it is own data: a path, a Bundle, a pair of inputs and labels, or a mapping with x and y and, if you like,
    test_x and test_y. Inputs are images, rows of numbers or texts. Data in memory is written to the run folder.
    """
    from profcil.engine.run import start

    loggers = make_loggers(log)
    if isinstance(method, type):
        method = registry.give_method(method)
    check_flags(flags, "profcil.run")
    flags = {**flags, "method": method}
    if data is None or isinstance(data, str | Path):
        config = resolve(recipe, {**flags, "data": data}, settings or {})
        if not again and (reused := equal_run(config, out, data_root(data))):
            note = f"{reused} has the same settings, data and code and is reused; again=True repeats it"
            warnings.warn(note, ReuseNote, stacklevel=2)
            return load_run(reused)
        path = Path(out) if out is not None else default_folder(config)
        with observer_of(observe, loggers, path) as watch:
            return load_run(start(config, path, data_root(data), watch))
    path = Path(out) if out is not None else unused_folder(f"own-{registry.short_name(str(method or 'promax'))}")
    with written_data(data, path) as file:
        config = resolve(recipe, {**flags, "data": file}, settings or {})
        with observer_of(observe, loggers, path) as watch:
            return load_run(start(config, path, file, watch))


def equal_run(config: RunConfig, out: str | Path | None, data: Path) -> Path | None:
    """A finished run that is the same as a new one would be: in `out` if given, else in any folder under runs/."""
    from profcil.runs.identity import find_equal_run, run_folders_below

    folders = run_folders_below(Path("runs")) if out is None else [Path(out)]
    return find_equal_run(config, folders, data)


def check_flags(flags: Mapping[str, Any], function: str) -> None:
    """Refuses a keyword that is no flag of `profcil run`: settings are given in `settings`."""
    for name, value in flags.items():
        if name not in FLAGS:
            raise ConfigError(
                f"{function} has no argument '{name}'; give a setting as settings={{'{name}': {value!r}}}, "
                f"or else {nearest(name, {*FLAGS, 'out', 'data', 'settings', 'again', 'observe'})}"
            )


@contextmanager
def written_data(data: Any, folder: Path) -> Iterator[Path]:
    """The file of data that was given in memory. If the run cannot start, it is removed again."""
    file = write_data(data, folder)
    try:
        yield file
    except ProfcilError:
        remove_unused(file)
        raise


def write_data(data: Any, folder: Path) -> Path:
    """Writes data that was given in memory to a new run folder, so that the run can be resumed. Returns the file."""
    from profcil.data import own
    from profcil.data.bundle import Bundle
    from profcil.runs.folder import RunFolder

    with RunFolder(folder) as opened:
        opened.check_new()
        if isinstance(data, Bundle):
            own.save_bundle(folder / "data.npz", data)
            return folder / "data.npz"
        if isinstance(data, tuple) and len(data) == 2:
            data = dict(zip("xy", data, strict=True))
        if not isinstance(data, Mapping) or not data:
            raise DataError("data is not understood; give a path, a Bundle, a pair (x, y) or a mapping with x and y")
        inputs = [values for key, values in data.items() if key == "x" or key.endswith("_x")]
        if inputs and len(inputs[0]) and isinstance(inputs[0][0], str):
            own.save_texts(folder / "data.jsonl", data)
            return folder / "data.jsonl"
        own.save_arrays(folder / "data.npz", data)
        return folder / "data.npz"


def remove_unused(file: Path) -> None:
    """Removes written data, and its folder, if no run has begun there."""
    if (file.parent / "config.toml").exists():
        return
    file.unlink(missing_ok=True)
    (file.parent / "lock").unlink(missing_ok=True)
    with suppress(OSError):
        file.parent.rmdir()


def resume(
    path: str | Path,
    *,
    data: str | Path | None = None,
    method: type | None = None,
    observe: Callable[[Progress], None] = lambda p: None,
    log: Given = (),
) -> Run:
    """Continues a stopped run and returns the finished run. `method` is the class, if the run was given one."""
    from profcil.engine import run as engine

    if method is not None:
        registry.give_method(method)
    data_dir = Path(data) if data is not None else None
    with observer_of(observe, make_loggers(log), Path(path)) as watch:
        return load_run(engine.resume(Path(path), data_dir, watch))


@contextmanager
def observer_of(observe: Callable[[Progress], None], loggers: Sequence[Logger], folder: Path) -> Iterator[Observer]:
    """An observer that calls `observe` and the loggers of a run."""
    with log_observer(loggers, folder, lambda text: warnings.warn(text, stacklevel=2)) as log:

        def watch(progress: Progress) -> None:
            observe(progress)
            log(progress)

        yield watch


def load_data(dataset: str, *, data: str | Path | None = None, seed: int = 0) -> Bundle:
    """A dataset: training and test examples, class names and facts. `seed` draws a split that is not official."""
    from profcil.data.loading import load_bundle

    return load_bundle(dataset, data_root(data), seed)


def data_root(given: str | Path | None) -> Path:
    """The folder of the datasets."""
    return Path(given or os.environ.get("PROFCIL_DATA") or "data")


def default_folder(config: RunConfig) -> Path:
    """The default folder of a run, with a number if it contains a run already."""
    dataset = config.own.name or OWN if config.dataset == OWN else config.dataset
    name = f"{dataset}-{config.setting}-{registry.short_name(config.method)}-seed{config.seed}"
    return unused_folder(name)


def unused_folder(name: str) -> Path:
    """The folder of this name under runs/, with a number if it contains a run already."""
    path = Path("runs") / name
    number = 1
    while (path / "config.toml").exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
