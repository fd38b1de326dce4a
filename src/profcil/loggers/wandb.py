"""Offline files of Weights & Biases, in RUN/logs/wandb, for `wandb sync`; `wandb=PROJECT` names the project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.loggers.base import FOLDER, Logger
from profcil.runs.settings_check import flatten_settings


class WandbLogger(Logger):
    package = "wandb"

    def begin(self, settings: Mapping[str, Any], folder: Path) -> None:
        import wandb

        place = folder / FOLDER
        place.mkdir(exist_ok=True)
        project = self.target or "profcil"
        config = flatten_settings(settings)
        self.run = wandb.init(mode="offline", project=project, name=folder.name, dir=str(place), config=config)
        for stage in ("warmup", "dictionary", "stream"):  # each counts its own rounds
            self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/round")
        for name in ("results", "tasks", "classes", "alignment"):
            self.run.define_metric(f"{name}/*", step_metric="position")

    def round(self, number: int, values: Mapping[str, float]) -> None:
        stage = next(iter(values)).partition("/")[0]
        self.run.log({**values, f"{stage}/round": number})

    def position(self, number: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "position": number})

    def end(self) -> None:
        self.run.finish()


LOGGER = WandbLogger
