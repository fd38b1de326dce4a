"""One CSV, divided into the folders of two sites: the simulation and the deployment end with the same bits."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest
from memory_grid import Grid
from test_simulated_sites import result
from walk_through import run_page

from profcil.deploy.server import entry


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def rows_of(path: str) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))[1:]


def test_the_app_of_the_walk_through_ends_with_the_bits_of_its_trial(tmp_path):
    """The page divides one table, simulates the sites and writes the app, which is run here without a network."""
    from sklearn.datasets import load_breast_cancer

    for _ in run_page("walk-through-two-hospitals.md"):
        pass
    parts = [rows_of(f"{name}/tumours.csv") for name in ("north", "south", "server")]
    assert sorted(float(row[0]) for part in parts for row in part) == sorted(load_breast_cancer().data[:, 0])
    project = tomllib.loads(Path("app/pyproject.toml").read_text())
    settings = {**project["tool"]["flwr"]["app"]["config"], "deadline": 5.0, "join": 1.0}
    nodes = {i: {"site": name, "home": "home"} for i, name in enumerate(("north", "south"))}
    deployed = entry.start(Grid(settings, nodes), settings)
    assert result(deployed) == result(Path("runs/trial"))
