"""A mistake of the user gives one sentence on stderr and an exit status, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profcil.cli import main as cli
from profcil.cli.main import VERBS, main

MAIN = "import sys; from profcil.cli.main import main; s = main(sys.argv[1:]); assert s == 0, s; "
MAIN += "slow = {'torch', 'numpy', 'rich', 'sklearn'} & set(sys.modules); assert not slow, slow"


def error_of(capsys: pytest.CaptureFixture[str], *line: str, status: int = 2) -> str:
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
        (["run", "--see", "3"], "--seed"),  # abbreviations are not accepted
        (["compare", "--jsno"], "--json"),  # reported before the missing RUN
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
def test_message_names_the_nearest(capsys: pytest.CaptureFixture[str], line: list[str], expected: str) -> None:
    _, question, suggestions = error_of(capsys, *line).partition("did you mean")
    assert question and expected in suggestions


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["run", "--seed", "-1"], "seed"),
        (["run", "--seed", "two"], "whole number"),
        (["run", "--set", "train.lr=-1"], "lr"),
        (["run", "--set", "participants=99"], "participants"),
        (["run", "--set", "rounds"], "key=value"),
        (["run", "--accelerate", "magic"], "choose one of auto, off"),
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
def test_message_says_what_is_allowed(capsys: pytest.CaptureFixture[str], line: list[str], expected: str) -> None:
    assert expected in error_of(capsys, *line)


def test_existing_run_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], runs: dict[str, Path], small: list[str]
) -> None:
    assert "profcil resume" in error_of(capsys, "run", "--out", str(runs["pro"]), "--quiet", *small)


def test_tensorboard_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    monkeypatch.setattr("profcil.loggers.observer.find_spec", lambda name: None)
    assert "profcil[tensorboard]" in error_of(capsys, "run", "--tensorboard", *small)
    assert not Path("runs").exists()


@pytest.mark.parametrize("line", [["--help"], [], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_imports_nothing_slow(line: list[str]) -> None:
    subprocess.run([sys.executable, "-c", MAIN, *line], check=True, capture_output=True)


def test_import_of_package_imports_nothing_slow() -> None:
    subprocess.run([sys.executable, "-c", "import profcil, sys; assert 'torch' not in sys.modules"], check=True)


def failing(error: BaseException):
    def dispatch(args: list[str]) -> int:
        raise error

    return dispatch


def test_unexpected_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", failing(ZeroDivisionError("first\nsecond")))
    err = error_of(capsys, "run", status=1)
    assert "ZeroDivisionError" in err and "PROFCIL_DEBUG=1" in err
    monkeypatch.setenv("PROFCIL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["run"])


PLUGIN_WITH_A_BUG = """from profcil.extend import Method


class Faulty(Method):
    def fit_loss(self, net, batch):
        return batch["absent"]


METHOD = Faulty
"""


def test_a_bug_in_a_plug_in_is_shown_with_file_and_line(capsys: pytest.CaptureFixture[str], small: list[str]) -> None:
    Path("faulty.py").write_text(PLUGIN_WITH_A_BUG)
    err = error_of(capsys, "run", "--method", "./faulty.py", "--quiet", *small, status=1)
    assert f"unexpected KeyError ('absent') in {Path('faulty.py').absolute()}, line 6;" in err


def test_a_bug_of_profcil_is_shown_with_file_and_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profcil.cli.list.KINDS", {"methods": dict})  # its rows are then no rows
    assert f" in {cli.__file__.replace('main.py', 'list.py')}, line " in error_of(capsys, "list", "methods", status=1)


def test_a_terminal_says_at_once_that_something_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for line, words in ((["run", "--seed", "x"], "loading ..."), (["study", "nowhere.toml"], "reading the study ...")):
        assert main(line) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first == words and second.startswith("profcil: ")
    assert "loading" not in error_of(capsys, "run", "--seed", "x", "--quiet")


def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", failing(KeyboardInterrupt()))
    assert "interrupted" in error_of(capsys, "run", status=130)


def test_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", MAIN.partition("; assert")[0], "--help"], stdout=write, stderr=-1)
    os.close(write)
    assert done.stderr == b""


DEEP = "[" * 20_000


def test_a_file_that_is_nested_too_deeply(capsys: pytest.CaptureFixture[str]) -> None:
    Path("deep.toml").write_text(f"seed = {DEEP}")
    assert "deep.toml" in error_of(capsys, "run", "deep.toml")
    assert "unexpected" not in error_of(capsys, "run", "--set", f"params.rehearse_space={DEEP}")
    Path("study.toml").write_text(f"seeds = {DEEP}")
    assert "unexpected" not in error_of(capsys, "study", "study.toml")


def test_an_unknown_place_that_is_nested_too_deeply(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "dispatch", failing(RecursionError("maximum recursion depth exceeded")))
    assert "nested too deeply" in error_of(capsys, "run")
