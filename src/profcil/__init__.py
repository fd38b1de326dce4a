"""profcil: heterogeneous federated class-incremental learning on one machine or many.

    run(...)         learns a stream and returns the finished run
    resume(path)     continues a stopped run
    load_run(path)   reads a run: settings, scores, traffic, metrics; does not need torch
    load_data(name)  loads a dataset
    load_model(path) loads the trained model of a finished run
    study(...)       runs a study and returns its table
    sweep(...)       runs every combination of some values and returns one table
    compare(runs)    a table of runs

These names are imported lazily, so that `import profcil` is fast. Plug-ins import from `profcil.extend`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profcil.api import load_data, resume, run
    from profcil.experiments import compare, study, sweep
    from profcil.runs.models.loading import load_model
    from profcil.runs.reader import load_run

__version__ = "0.9.1"  # the one place: pyproject.toml and `profcil --version` read it from here

__all__ = ["__version__", "compare", "load_data", "load_model", "load_run", "resume", "run", "study", "sweep"]
MODULES = {
    "compare": "experiments",
    "load_data": "api",
    "load_model": "runs.models.loading",
    "load_run": "runs.reader",
    "resume": "api",
    "run": "api",
    "study": "experiments",
    "sweep": "experiments",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'profcil' has no attribute '{name}'")
    return getattr(import_module(f"profcil.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
