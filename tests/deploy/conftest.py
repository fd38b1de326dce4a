"""A deployment without a network. Without Flower, no test of this folder is collected."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("flwr") else ["test_*.py"]


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short polling intervals, an empty cache, and the task identity that Flower gives every process."""
    from flwr.supercore.task_identity import TaskIdentity

    from profcil.deploy.server import entry, fleet

    monkeypatch.setattr(fleet, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(entry, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def deployed(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """A function that runs a deployment on a grid in memory. It returns the run folder and the grid."""
    from memory_grid import Grid

    from profcil.deploy.app_folder import settings_table
    from profcil.deploy.server import entry

    def deploy(config: Any, *, fault: Any = None, out: str = "run", nodes: int = 3, **policy: Any) -> tuple[Path, Grid]:
        settings = settings_table(config, tmp_path / out, tmp_path, **{"deadline": 0.3, "join": 0.3, **policy})
        configs = {100 + i: {"client": i, "home": str(tmp_path / "sites")} for i in range(nodes)}
        grid = Grid(settings, configs, fault) if fault else Grid(settings, configs)
        return entry.start(grid, settings), grid

    return deploy
