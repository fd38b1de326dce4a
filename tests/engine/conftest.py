from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tiny_runs

from profcil.engine import recorder, run
from profcil.methods import fedavg


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests share no warm-up, and do not use those of the user."""
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg with a trace of everything, saved after every round."""
    monkeypatch.setattr(fedavg, "METHOD", tiny_runs.TracingMethod)
    monkeypatch.setattr(recorder, "SAVE_SECONDS", -1)


@pytest.fixture(scope="session")
def undisturbed_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """The outcome of the tracing run when nothing happens to it, by the setting `accelerate`."""

    @cache
    def finished(accelerate: str) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("undisturbed")
            patch.setenv("PROFCIL_CACHE", str(folder / "cache"))
            patch.setattr(fedavg, "METHOD", tiny_runs.TracingMethod)
            return tiny_runs.outcome(run.start(tiny_runs.tiny(accelerate=accelerate), folder / "run", folder))

    return finished


@pytest.fixture(scope="session")
def undisturbed(undisturbed_by: Callable[[str], dict]) -> dict:
    """That of the default path."""
    return undisturbed_by("auto")
