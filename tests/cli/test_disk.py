"""A file, a folder or a disk that refuses: one sentence that names it, or time lost and nothing else."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.io.cache_folder import cache_folder


def sentence(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(list(line)) == 2
    err = capsys.readouterr().err
    assert err.startswith("profcil: ") and err.count("\n") == 1 and "unexpected" not in err
    return err


class Capabilities:
    """Root may read everything unless it lays that right down for a while."""

    MAY_IGNORE_MODES = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        self.data = (ctypes.c_uint32 * 6)()
        assert self.libc.capget(self.header, self.data) == 0
        self.before = self.data[0]

    def set(self, effective: int) -> None:
        self.data[0] = effective
        assert self.libc.capset(self.header, self.data) == 0


@pytest.fixture
def lock() -> Iterator[Callable[[Path], None]]:
    """Takes all rights on a folder away until the test is over."""
    if not sys.platform.startswith("linux"):
        pytest.skip("capabilities are Linux's")
    rights, locked = Capabilities(), []

    def take(path: Path, mode: int = 0) -> None:
        locked.append(path)
        path.chmod(mode)
        rights.set(rights.before & ~rights.MAY_IGNORE_MODES)

    yield take
    rights.set(rights.before)
    for path in locked:
        path.chmod(0o755)


def test_an_unreadable_warm_up_cache_costs_time_only(
    capsys: pytest.CaptureFixture[str], lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: list[str]
) -> None:
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    (cache_folder() / "warmup").mkdir(parents=True)
    lock(cache_folder())
    assert main(["run", "--method", "fedavg", "--quiet", "--json", *small]) == 0
    capsys.readouterr()
    assert main(["doctor", "--json", "--data-dir", "empty"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["bytes"] == 0


@pytest.mark.parametrize("verb", ["compare", "status", "diagnose", "resume"])
def test_a_run_that_may_not_be_read(capsys: pytest.CaptureFixture[str], lock, runs, verb: str) -> None:
    shutil.copytree(runs["pro"], "closed")
    lock(Path("closed"))
    said = sentence(capsys, verb, "closed")
    assert "closed" in said and "(Permission denied);" in said


def test_a_closed_run_among_others_is_named(capsys: pytest.CaptureFixture[str], lock, runs) -> None:
    for name in ("pro", "fedavg"):
        shutil.copytree(runs[name], Path("cells") / name)
    lock(Path("cells/pro"))
    assert main(["report", "cells", "--out", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert "1 runs" in out and "left out: cells/pro" in err and "Permission denied" in err
    lock(Path("cells"))
    assert "(Permission denied)" in sentence(capsys, "report", "cells")


def test_data_that_may_not_be_read(capsys: pytest.CaptureFixture[str], lock) -> None:
    Path("data/cora").mkdir(parents=True)
    lock(Path("data/cora"))
    assert "data/cora" in (said := sentence(capsys, "run", "cora")) and "(Permission denied)" in said
    assert main(["data", "status", "--json"]) == 0
    rows = {row["dataset"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["complete"] and not rows["cora"]["present"]
    assert "Permission denied" in rows["cora"]["missing"][0] and rows["cora"]["where"] == ""
    assert main(["data", "verify", "cora"]) == 1
    assert "Permission denied" in capsys.readouterr().out


TAKEN = {
    "study": ["study", "demo", "--out", "taken"],
    "app": ["deploy", "app", "--out", "taken"],
    "certs": ["deploy", "certs", "--out", "taken"],
    "fetch": ["data", "fetch", "cora", "--data-dir", "taken"],
    "page": ["list", "methods", "--page", "taken/methods.md"],
    "figure": ["figure", "explain", "RUN", "--out", "taken"],
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_file_in_the_way(capsys: pytest.CaptureFixture[str], runs, name: str) -> None:
    pytest.importorskip("cryptography")
    Path("taken").write_text("mine")
    line = [str(runs["pro"]) if word == "RUN" else word for word in TAKEN[name]]
    assert main(line) == 2
    *_, last = capsys.readouterr().err.splitlines()  # a study tells its outlook first
    assert last.startswith("profcil: taken") and "choose another" in last
    assert Path("taken").read_text() == "mine"


def test_a_federation_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch.toml could not be read" in sentence(capsys, "deploy", "app", "--federation", "nosuch.toml")
    Path("bytes.toml").write_bytes(b"\xff")
    assert "bytes.toml cannot be read as TOML" in sentence(capsys, "deploy", "app", "--federation", "bytes.toml")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Fills the disk for files whose path ends in something."""

    def fill(ending: str) -> None:
        write = os.fsync

        def refuse(number: int) -> None:
            if os.readlink(f"/proc/self/fd/{number}").removesuffix(f".{os.getpid()}.part").endswith(ending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(number)

        monkeypatch.setattr(os, "fsync", refuse)

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    return fill


@pytest.mark.parametrize("name", ["diagnostics.json", "replay.npz"])
def test_a_full_disk_while_diagnosing(capsys: pytest.CaptureFixture[str], runs, full, name: str) -> None:
    shutil.copytree(runs["pro"], "tight")
    full(name)
    said = sentence(capsys, "diagnose", "tight")
    assert f"tight/{name} could not be read or written (No space left on device); free some space" in said
    assert not list(Path("tight").glob(".*.part"))


def test_a_full_disk_while_keeping_memories(capsys: pytest.CaptureFixture[str], full, small: list[str]) -> None:
    full("position-001.safetensors")
    line = ["run", "--method", "pro", "--out", "kept", "--quiet", "--set", "keep_memories=true", *small]
    assert "profcil resume kept" in sentence(capsys, *line)


@pytest.mark.parametrize("ending", [".toml", "methods.md"])
def test_a_full_disk_for_what_is_written_beside_runs(capsys: pytest.CaptureFixture[str], full, ending: str) -> None:
    full(ending)
    line = ["study", "demo", "--out", "cells"] if ending == ".toml" else ["list", "methods", "--page", "methods.md"]
    assert main(line) == 2
    assert f"{ending} could not be read or written (No space left on device)" in capsys.readouterr().err
    assert not Path("methods.md").exists()


def test_certificates_are_all_there_or_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from profcil.deploy import certs

    def refuse(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(certs, "write_public", refuse)
        assert "certs/ca.crt could not be" in sentence(capsys, "deploy", "certs")
    assert not list(Path("certs").iterdir())
    assert main(["deploy", "certs", "--nodes", "1"]) == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--device", "mps"], "use cpu"),
        (["--device", "xla"], "use cpu"),
        (["--device", "meta"], "use cpu"),
        (["--threads", "99999999999999"], "threads is 99999999999999, allowed is at most"),
        (["--set", "workers=100000"], "workers is 100000, allowed is at most"),
    ],
)
def test_a_machine_that_there_is_not(
    capsys: pytest.CaptureFixture[str], flags: list[str], expected: str, small: list[str]
) -> None:
    assert expected in sentence(capsys, "run", "--quiet", *small, *flags)
    assert not list(Path().glob("runs/*"))


def test_no_more_workers_than_participants(small: list[str]) -> None:
    from profcil.engine.world import make_world
    from profcil.resolve import resolve

    world = make_world(resolve(None, {"method": "fedavg"}, [*small[1::2], "workers=900"]), Path("nowhere"))
    assert world.executor.workers == world.config.stream.participants == 2


def test_a_terminal_without_the_letters(runs) -> None:
    line = [sys.executable, "-m", "profcil", "diagnose", str(runs["pro"])]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, capture_output=True, env=env, check=True)
    assert b"MMD?" in done.stdout and done.stderr == b""
