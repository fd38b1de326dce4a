"""Errors of files and disks: one sentence that names the file. An unusable cache only costs time."""

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


def error_of(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(list(line)) == 2
    err = capsys.readouterr().err
    assert err.startswith("profcil: ") and err.count("\n") == 1 and "unexpected" not in err
    return err


class Capabilities:
    """The capabilities of this process. Root ignores permissions unless it drops these."""

    IGNORE_PERMISSIONS = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH

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
    """Removes the permissions of a folder until the end of the test."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux capabilities")
    capabilities = Capabilities()
    locked = []

    def remove(path: Path, mode: int = 0) -> None:
        locked.append(path)
        path.chmod(mode)
        capabilities.set(capabilities.before & ~capabilities.IGNORE_PERMISSIONS)

    yield remove
    capabilities.set(capabilities.before)
    for path in locked:
        path.chmod(0o755)


def test_unreadable_cache_is_ignored(
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
def test_run_without_permission(capsys: pytest.CaptureFixture[str], lock, runs, verb: str) -> None:
    shutil.copytree(runs["pro"], "closed")
    lock(Path("closed"))
    message = error_of(capsys, verb, "closed")
    assert "closed" in message and "(Permission denied); " in message


def test_report_names_a_run_without_permission(capsys: pytest.CaptureFixture[str], lock, runs) -> None:
    for name in ("pro", "fedavg"):
        shutil.copytree(runs[name], Path("cells") / name)
    lock(Path("cells/pro"))
    assert main(["report", "cells", "--out", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert "page.html: 1 run\n" in out and "left out: cells/pro" in err and "Permission denied" in err
    lock(Path("cells"))
    assert "(Permission denied)" in error_of(capsys, "report", "cells")


def test_data_without_permission(capsys: pytest.CaptureFixture[str], lock) -> None:
    Path("data/cora").mkdir(parents=True)
    lock(Path("data/cora"))
    message = error_of(capsys, "run", "cora")
    assert "data/cora" in message and "(Permission denied)" in message
    assert main(["data", "status", "--json"]) == 0
    rows = {row["dataset"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["complete"] and not rows["cora"]["present"]
    assert "Permission denied" in rows["cora"]["missing"][0] and rows["cora"]["where"] == ""
    assert main(["data", "verify", "cora"]) == 1
    assert "Permission denied" in capsys.readouterr().out


WRITERS = {
    "study": ["study", "demo", "--out", "taken"],
    "app": ["deploy", "app", "--out", "taken"],
    "certs": ["deploy", "certs", "--out", "taken"],
    "fetch": ["data", "fetch", "cora", "--data-dir", "taken"],
    "page": ["list", "methods", "--page", "taken/methods.md"],
    "figure": ["figure", "explain", "RUN", "--out", "taken"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_file_in_place_of_a_folder(capsys: pytest.CaptureFixture[str], runs, name: str) -> None:
    pytest.importorskip("cryptography")
    Path("taken").write_text("mine")
    line = [str(runs["pro"]) if word == "RUN" else word for word in WRITERS[name]]
    assert main(line) == 2
    *_, last = capsys.readouterr().err.splitlines()  # a study prints its plan first
    assert last.startswith("profcil: taken") and "choose another" in last
    assert Path("taken").read_text() == "mine"


def test_missing_federation_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch.toml could not be read" in error_of(capsys, "deploy", "app", "--federation", "nosuch.toml")
    Path("bytes.toml").write_bytes(b"\xff")
    assert "bytes.toml cannot be read as TOML" in error_of(capsys, "deploy", "app", "--federation", "bytes.toml")


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes writes fail as on a full disk, for files with this ending."""

    def fail_for(ending: str) -> None:
        real_fsync = os.fsync

        def fsync(number: int) -> None:
            if os.readlink(f"/proc/self/fd/{number}").removesuffix(f".{os.getpid()}.part").endswith(ending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real_fsync(number)

        monkeypatch.setattr(os, "fsync", fsync)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    return fail_for


@pytest.mark.parametrize("name", ["diagnostics.json", "replay.npz"])
def test_full_disk_during_diagnose(capsys: pytest.CaptureFixture[str], runs, fill_disk, name: str) -> None:
    shutil.copytree(runs["pro"], "tight")
    fill_disk(name)
    message = error_of(capsys, "diagnose", "tight")
    assert f"tight/{name} could not be read or written (No space left on device); free some space" in message
    assert not list(Path("tight").glob(".*.part"))


def test_full_disk_while_writing_memories(capsys: pytest.CaptureFixture[str], fill_disk, small: list[str]) -> None:
    fill_disk("position-001.safetensors")
    line = ["run", "--method", "pro", "--out", "kept", "--quiet", "--set", "keep_memories=true", *small]
    assert "profcil resume kept" in error_of(capsys, *line)


@pytest.mark.parametrize("ending", [".toml", "methods.md"])
def test_full_disk_for_other_files(capsys: pytest.CaptureFixture[str], fill_disk, ending: str) -> None:
    fill_disk(ending)
    line = ["study", "demo", "--out", "cells"] if ending == ".toml" else ["list", "methods", "--page", "methods.md"]
    assert main(line) == 2
    assert f"{ending} could not be read or written (No space left on device)" in capsys.readouterr().err
    assert not Path("methods.md").exists()


def test_certificates_are_written_all_or_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from profcil.deploy.local import certs

    def refuse(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(certs, "write_public", refuse)
        assert "certs/ca.crt could not be" in error_of(capsys, "deploy", "certs")
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
def test_impossible_device_or_threads(
    capsys: pytest.CaptureFixture[str], flags: list[str], expected: str, small: list[str]
) -> None:
    assert expected in error_of(capsys, "run", "--quiet", *small, *flags)
    assert not list(Path().glob("runs/*"))


def test_workers_are_limited_to_participants(small: list[str]) -> None:
    from profcil.engine.world import make_world
    from profcil.resolve import resolve

    world = make_world(resolve(None, {"method": "fedavg"}, [*small[1::2], "workers=900"]), Path("nowhere"))
    assert world.executor.acceleration.workers == world.config.stream.participants == 2


def test_terminal_that_lacks_a_character(runs) -> None:
    line = [sys.executable, "-m", "profcil", "diagnose", str(runs["pro"])]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, capture_output=True, env=env, check=True)
    assert b"MMD?" in done.stdout and done.stderr == b""
