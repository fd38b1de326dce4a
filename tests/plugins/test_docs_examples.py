"""The plug-in examples of the documentation run unchanged, and import stable names only."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import profcil.extend
from profcil import registry
from profcil.cli.main import main

ROOT = Path(__file__).parents[2]
STABLE = {"profcil", "profcil.extend"}


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def write_blobs(folder: Path) -> None:
    """The file that the example dataset reads."""
    x = np.random.default_rng(0).integers(0, 256, (120, 3, 8, 8), dtype=np.uint8)
    y = np.arange(120) % 12
    folder.mkdir(parents=True)
    np.savez(folder / "blobs.npz", x=x, y=y, x_test=x[:24], y_test=y[:24])


def test_package_of_extending_page(install_plugin: Callable[..., Path], tmp_path: Path) -> None:
    (table,) = code_blocks("docs/extending.md", "toml")
    sources = {re.match(r"# mypkg/(\w+)\.py", text)[1]: text for text in code_blocks("docs/extending.md", "python")}
    entries = tomllib.loads(table)["project"]["entry-points"]
    plugins = {group.removeprefix("profcil."): points for group, points in entries.items()}
    assert plugins.keys() | {"loggers"} == registry.GROUPS.keys()  # docs/watching.md has the logger
    for points in plugins.values():
        assert all(module == f"mypkg.{name}" for name, module in points.items())
    install_plugin(**{group: {name: sources[name] for name in points} for group, points in plugins.items()})
    write_blobs(tmp_path / "data" / "blobs")
    small = ["--data-dir", "data", "--set", "train.rounds=1", "--set", "warmup.rounds=1", "--set", "train.epochs=1"]
    line = ["run", "--dataset", "blobs", "--method", "scaled", "--set", "encoder=mlp", "--set", "scale=0.5", *small]
    assert main([*line, "--out", "own", "--quiet"]) == 0
    study = ["study", "severe", "--datasets", "blobs", "--methods", "fedavg,promax", "--seeds", "0"]
    assert main([*study, *small, "--out", "study"]) == 0
    assert main(["data", "verify", "blobs", "--data-dir", "data"]) == 0


def test_logger_of_watching_page(install_plugin: Callable[..., Path]) -> None:
    (source,) = code_blocks("docs/watching.md", "python")
    (table,) = code_blocks("docs/watching.md", "toml")
    assert tomllib.loads(table)["project"]["entry-points"] == {"profcil.loggers": {"best": "mypkg.best"}}
    install_plugin(loggers={"best": source})
    sets = ("rounds=1", "epochs=1", "warmup.rounds=1", "task_size=5", "clients=3", "participants=2")
    line = [part for item in sets for part in ("--set", item)]
    assert main(["run", "--method", "fedavg", "--log", "best,csv", "--out", "own", "--quiet", *line]) == 0
    lines = Path("own/logs/positions.csv").read_text().splitlines()
    column = lines[0].split(",").index("faa")
    best = max(float(line.split(",")[column]) for line in lines[1:])
    assert Path("own/logs/best.txt").read_text() == f"{best:.1f} after position 2\n"


def test_method_of_readme(install_plugin: Callable[..., Path]) -> None:
    (source,) = [text for text in code_blocks("README.md", "python") if "METHOD" in text]
    install_plugin(methods={"mine": source})
    sets = ("rounds=1", "epochs=1", "warmup.rounds=1", "task_size=5", "scale=3", "clients=3", "participants=2")
    line = [part for item in sets for part in ("--set", item)]
    assert main(["run", "--method", "mine", "--out", "own", "--quiet", *line]) == 0


def test_every_name_of_extend_resolves() -> None:
    names = profcil.extend.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(profcil.extend, name) for name in names)


def imports_from_profcil(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of every import from profcil."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "profcil":
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "profcil")


@pytest.mark.parametrize("page", ["docs/extending.md", "docs/watching.md", "README.md"])
def test_examples_import_stable_names_only(page: str) -> None:
    imports = [found for source in code_blocks(page, "python") for found in imports_from_profcil(source)]
    assert imports
    for module, name in imports:
        assert module in STABLE, f"{page} imports {name} from {module}"
        if module == "profcil.extend":
            assert name in profcil.extend.__all__
