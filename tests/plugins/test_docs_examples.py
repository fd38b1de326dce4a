"""The examples of the documentation, as they stand, in a package of their own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profcil import registry
from profcil.cli.main import main

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def test_the_package_of_the_page(install_plugin: Callable[..., Path], tmp_path: Path) -> None:
    (table,) = blocks("docs/extending.md", "toml")
    sources = {re.match(r"# mypkg/(\w+)\.py", text)[1]: text for text in blocks("docs/extending.md", "python")}
    entries = tomllib.loads(table)["project"]["entry-points"]
    plugins = {group.removeprefix("profcil."): names for group, names in entries.items()}
    assert plugins.keys() == registry.GROUPS.keys()
    assert all(module == f"mypkg.{name}" for names in plugins.values() for name, module in names.items())
    install_plugin(**{group: {name: sources[name] for name in names} for group, names in plugins.items()})
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (120, 3, 8, 8), dtype=np.uint8), np.arange(120) % 12
    (tmp_path / "data" / "blobs").mkdir(parents=True)
    np.savez(tmp_path / "data" / "blobs" / "blobs.npz", x=x, y=y, x_test=x[:24], y_test=y[:24])
    small = ["--data-dir", "data", "--set", "train.rounds=1", "--set", "warmup.rounds=1", "--set", "train.epochs=1"]
    line = ["run", "--dataset", "blobs", "--method", "scaled", "--set", "encoder=mlp", "--set", "scale=0.5", *small]
    assert main([*line, "--out", "own", "--quiet"]) == 0
    study = ["study", "severe", "--datasets", "blobs", "--methods", "fedavg,promax", "--seeds", "0"]
    assert main([*study, *small, "--out", "study"]) == 0
    assert main(["data", "verify", "blobs", "--data-dir", "data"]) == 0


def test_the_method_of_the_readme(install_plugin: Callable[..., Path]) -> None:
    (source,) = [text for text in blocks("README.md", "python") if "METHOD" in text]
    install_plugin(methods={"mine": source})
    sets = ("rounds=1", "epochs=1", "warmup.rounds=1", "task_size=5", "scale=3", "clients=3", "participants=2")
    line = [part for item in sets for part in ("--set", item)]
    assert main(["run", "--method", "mine", "--out", "own", "--quiet", *line]) == 0
