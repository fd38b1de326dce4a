from __future__ import annotations

from pathlib import Path

import pytest

from profcil.cli.main import main

SMALL = ("train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=2", "task_size=5")
TINY = [part for item in SMALL for part in ("--set", item)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A working folder for every test. The cache of warm-ups is shared by the session and is not the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))
    monkeypatch.delenv("PROFCIL_DATA", raising=False)
    monkeypatch.delenv("PROFCIL_DEBUG", raising=False)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs, made by the command line. Tests must not modify them."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROFCIL_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))
        for name, method, seed in (("fedavg", "fedavg", "0"), ("pro", "pro", "0"), ("pro1", "pro", "1")):
            line = ["run", "--method", method, "--seed", seed, "--out", str(root / name), "--quiet", *TINY]
            assert main(line) == 0
    return {name: root / name for name in ("fedavg", "pro", "pro1")}


@pytest.fixture
def small() -> list[str]:
    return list(TINY)
