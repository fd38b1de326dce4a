"""Loggers as an observer of a run. A logger that fails is left out with one sentence; the run goes on."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from profcil import registry
from profcil.errors import ConfigError
from profcil.loggers.base import Logger
from profcil.loggers.values import position_values, round_values

if TYPE_CHECKING:
    from profcil.engine.recorder import Progress

Observer = Callable[["Progress"], None]
Given = str | Logger | Sequence[str | Logger]  # names with commas, a logger, or several of both


def make_loggers(given: Given) -> list[Logger]:
    """Loggers by name, or as they were given. An unknown name or a missing package is an error before the run."""
    parts = [given] if isinstance(given, str | Logger) else given
    loggers: list[Logger] = []
    for part in parts:
        if isinstance(part, Logger):
            loggers.append(part)
        elif isinstance(part, str):
            loggers += [make_logger(text.strip()) for text in part.split(",") if text.strip()]
        else:
            raise ConfigError(f"log has {part!r}, allowed are names and objects of profcil.extend.Logger")
    return loggers


def make_logger(text: str) -> Logger:
    """The logger of `NAME` or `NAME=TARGET`."""
    name, _, target = text.partition("=")
    logger: type[Logger] = registry.find("loggers", name).LOGGER
    if logger.package and find_spec(logger.package) is None:
        raise ConfigError(
            f"the logger {name} needs the package {logger.package}, which is not installed; "
            f"install it with `pip install 'profcil[{logger.package}]'` or leave out the logger"
        )
    return logger(target)


@contextmanager
def log_observer(loggers: Sequence[Logger], folder: Path, warn: Callable[[str], None]) -> Iterator[Observer]:
    """An observer that calls the loggers of a run in `folder`. They end with the run, however that ends."""
    guarded = [GuardedLogger(logger, folder, warn) for logger in loggers]

    def observe(progress: Progress) -> None:
        for each in guarded:
            each.call(partial(each.receive, progress))

    try:
        yield observe
    finally:
        for each in guarded:
            each.call(each.end)


class GuardedLogger:
    """Calls a logger until it fails for the first time."""

    def __init__(self, logger: Logger, folder: Path, warn: Callable[[str], None]) -> None:
        self.logger = logger
        self.folder = folder
        self.warn = warn
        self.has_begun = False
        self.has_failed = False

    def call(self, work: Callable[[], None]) -> None:
        if self.has_failed:
            return
        try:
            work()
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            self.has_failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            name = type(self.logger).__name__
            self.warn(f"the logger {name} failed ({reason}); the run goes on without it")

    def receive(self, progress: Progress) -> None:
        """Passes a message on. The logger begins with the first one: only then does the run folder exist."""
        if not self.has_begun:
            self.has_begun = True
            settings = tomllib.loads((self.folder / "config.toml").read_text(encoding="utf-8"))
            self.logger.begin(settings, self.folder)
        if progress.what == "position":
            self.logger.position(progress.when.position + 1, position_values(progress, self.folder))
        else:
            self.logger.round(progress.done, round_values(progress))

    def end(self) -> None:
        if self.has_begun:
            self.logger.end()
