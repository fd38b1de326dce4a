"""Parameters and metrics for MLflow, in RUN/logs/mlflow.db or at the tracking address after `mlflow=`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.loggers.base import FOLDER, Logger
from profcil.runs.settings_check import flatten_settings


class MlflowLogger(Logger):
    package = "mlflow"

    def begin(self, settings: Mapping[str, Any], folder: Path) -> None:
        import mlflow

        self.mlflow = mlflow
        (folder / FOLDER).mkdir(exist_ok=True)
        mlflow.set_tracking_uri(self.target or f"sqlite:///{(folder / FOLDER / 'mlflow.db').absolute()}")
        mlflow.set_experiment("profcil")
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(flatten_settings(settings))

    def write(self, number: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=number)

    round = write
    position = write

    def end(self) -> None:
        self.mlflow.end_run()


LOGGER = MlflowLogger
