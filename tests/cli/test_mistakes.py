"""A user's mistake is one sentence on stderr and an exit status, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profcil.cli import main as cli
from profcil.cli.main import VERBS, main

LIGHT = "import sys; from profcil.cli.main import main; s = main(sys.argv[1:]); assert s == 0, s; "
LIGHT += "heavy = {'torch', 'numpy', 'rich', 'sklearn'} & set(sys.modules); assert not heavy, heavy"


def sentence(capsys: pytest.CaptureFixture[str], *line: str, status: int = 2) -> str:
    assert main(list(line)) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("profcil: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["rnu"], "run"),
        (["comapre", "x"], "compare"),
        (["--hlep"], "--help"),
        (["run", "--sede", "3"], "--seed"),
        (["run", "--see", "3"], "--seed"),  # abbreviations are not guessed
        (["compare", "--jsno"], "--json"),  # told before the missing RUN
        (["run", "--dataset", "digit"], "digits"),
        (["run", "--method", "fedavgg"], "fedavg"),
        (["run", "--setting", "sever"], "severe"),
        (["run", "digits-sever"], "digits-severe"),
        (["run", "--set", "task_sizes=2"], "task_size"),
        (["list", "method"], "methods"),
        (["data", "stauts"], "status"),
        (["data", "verify", "coar"], "cora"),
        (["compare", ".", "--reference", "fedagv"], "fedavg"),
    ],
)
def test_names_the_nearest(capsys: pytest.CaptureFixture[str], line: list[str], expected: str) -> None:
    assert "did you mean" in (err := sentence(capsys, *line)) and expected in err.partition("did you mean")[2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["run", "--seed", "-1"], "seed"),
        (["run", "--seed", "two"], "whole number"),
        (["run", "--set", "train.lr=-1"], "lr"),
        (["run", "--set", "participants=99"], "participants"),
        (["run", "--set", "rounds"], "key=value"),
        (["run", "--executor", "magic"], "stacked"),
        (["run", "--device", "toaster"], "cpu"),
        (["run", "nowhere.toml"], "profcil list recipes"),
        (["run", "--dataset", "cora", "--data-dir", "empty"], "profcil data fetch cora"),
        (["plan", "--limit", "few"], "--limit"),
        (["resume"], "RUN"),
        (["resume", "nowhere"], "profcil run"),
        (["compare"], "RUN"),
        (["run", "digits", "digits"], "unrecognized"),
        (["data", "fetch"], "cora"),
    ],
)
def test_says_what_is_allowed(capsys: pytest.CaptureFixture[str], line: list[str], expected: str) -> None:
    assert expected in sentence(capsys, *line)


def test_a_run_in_the_way(capsys: pytest.CaptureFixture[str], runs: dict[str, Path], small: list[str]) -> None:
    assert "profcil resume" in sentence(capsys, "run", "--out", str(runs["pro"]), "--quiet", *small)


def test_tensorboard_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    monkeypatch.setattr("profcil.cli.progress.find_spec", lambda name: None)
    assert "profcil[tensorboard]" in sentence(capsys, "run", "--tensorboard", *small)
    assert not Path("runs").exists()


@pytest.mark.parametrize("line", [["--help"], [], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_imports_nothing_heavy(line: list[str]) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, *line], check=True, capture_output=True)


def test_importing_the_package_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", "import profcil, sys; assert 'torch' not in sys.modules"], check=True)


def failing(error: BaseException):
    def dispatch(args: list[str]) -> int:
        raise error

    return dispatch


def test_what_nobody_expected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", failing(ZeroDivisionError("first\nsecond")))
    err = sentence(capsys, "run", status=1)
    assert "ZeroDivisionError" in err and "PROFCIL_DEBUG=1" in err
    monkeypatch.setenv("PROFCIL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["run"])


def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", failing(KeyboardInterrupt()))
    assert "interrupted" in sentence(capsys, "run", status=130)


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", LIGHT.partition("; assert")[0], "--help"], stdout=write, stderr=-1)
    os.close(write)
    assert done.stderr == b""
