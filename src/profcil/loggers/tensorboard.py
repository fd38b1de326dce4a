"""Scalars for TensorBoard, in RUN/logs/tensorboard or in the folder after `tensorboard=`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.loggers.base import FOLDER, Logger


class TensorboardLogger(Logger):
    package = "tensorboard"

    def begin(self, settings: Mapping[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.target or str(folder / FOLDER / "tensorboard"))

    def write(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)
        self.writer.flush()

    round = write
    position = write

    def end(self) -> None:
        self.writer.close()


LOGGER = TensorboardLogger
