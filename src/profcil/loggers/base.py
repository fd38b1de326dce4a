"""What a logger is: a class whose functions are called while a run is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

FOLDER = "logs"  # in the run folder


class Logger:
    """Receives the values that a run measures. Override what you need; the functions here do nothing.

    `values` maps names such as `stream/loss` and `results/faa` to numbers. docs/watching.md lists them.
    """

    package: ClassVar[str] = ""  # a package that has to be installed; its extra has the same name

    def __init__(self, target: str = "") -> None:
        self.target = target  # what the user wrote after the name: `--log csv=FOLDER`

    def begin(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Before the first values. `settings` are those of config.toml, `folder` is the run folder."""

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """After a round of a stage; rounds count from 1 in each stage (warmup, dictionary, stream)."""

    def position(self, number: int, values: Mapping[str, float]) -> None:
        """After a position; positions count from 1."""

    def end(self) -> None:
        """After the last values, whether the run is finished or was stopped."""
