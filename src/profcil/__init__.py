"""profcil: heterogeneous federated class-incremental learning on one machine or many.

    run(...)         learns a stream and gives the finished run
    resume(path)     goes on with a run that was stopped
    load_run(path)   reads a run: settings, scores, traffic, metrics; needs no torch
    load_data(name)  a dataset
    load_model(path) the trained model of a finished run, to predict with

Importing the package imports none of them; they are fetched when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profcil.api import load_data, resume, run
    from profcil.runs.reader import load_run
    from profcil.runs.trained_model import load_model

__version__ = "0.1.0"  # the one place: pyproject.toml and `profcil --version` read it from here

__all__ = ["__version__", "load_data", "load_model", "load_run", "resume", "run"]
HOMES = {
    "load_data": "api",
    "load_model": "runs.trained_model",
    "load_run": "runs.reader",
    "resume": "api",
    "run": "api",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'profcil' has no attribute '{name}'")
    return getattr(import_module(f"profcil.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
