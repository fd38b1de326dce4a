"""Ctrl-C at any point saves up to the last complete round, and nothing of the interrupted one."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TRAIN, at_call, events, outcome, path_of, tiny

from profcil.cli.main import main
from profcil.engine import recorder, run
from profcil.errors import RunFolderError
from profcil.io.interrupts import signal_handlers
from profcil.resolve import to_toml

SPOTS = [
    (TRAIN, 4),  # between two clients
    ("profcil.engine.executor:Executor.run", 3),  # in a round, where all clients advance together
    ("profcil.engine.channel:Channel.up", 10),  # one client's private memory is new, the other's is not
    ("profcil.methods.base:average", 5),
    ("profcil.engine.loop:evaluate", 2),  # the position has ended on the server, but is not counted
    ("profcil.runs.folder:RunFolder.append", 4),
    ("profcil.engine.run:RunRecorder.hold", 4),  # reported, but not held
    ("profcil.runs.folder:RunFolder.save", 3),
]


@pytest.fixture(autouse=True)
def every_position_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where they take long."""
    monkeypatch.setattr(recorder, "MIN_SAVE_SECONDS", -1)


def press_ctrl_c(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt(out: Path, spot: str, number: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        at_call(spot, number, press_ctrl_c, patch.setattr)
        with pytest.raises(run.Interrupted) as raised:
            run.start(tiny(accelerate=path_of(spot)), out, out.parent)
    return str(raised.value)


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(("spot", "number"), SPOTS)
def test_goes_on_to_the_same_bits(
    spot: str, number: int, tmp_path: Path, undisturbed_by: Callable[[str], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "SAVE_SECONDS", 3600)  # what is saved is saved because of Ctrl-C
    out = tmp_path / "run"
    assert f"`profcil resume {out}`" in interrupt(out, spot, number)
    whole = {(e["position"], e["round"]) for e in events(out) if e["event"] == "round"}
    with open(out / "ledger.csv") as file:
        booked = {(int(r["position"]), int(r["round"])) for r in csv.DictReader(file) if r["stage"] != "warmup"}
    assert booked == whole
    assert outcome(run.resume(out)) == undisturbed_by(path_of(spot))


@pytest.mark.usefixtures("tracing")
def test_a_second_ctrl_c_waits_for_what_the_first_has_begun_to_save(
    tmp_path: Path, undisturbed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "SAVE_SECONDS", 3600)
    with pytest.MonkeyPatch.context() as patch:
        at_call("profcil.engine.loop:evaluate", 2, press_ctrl_c, patch.setattr)
        at_call(
            "profcil.engine.run:RunRecorder.save", 3, press_ctrl_c, patch.setattr
        )  # the first state, a position, this one
        with pytest.raises(run.Interrupted, match="everything up to the last whole round is saved"):
            run.start(tiny(), tmp_path / "run", tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert outcome(run.resume(tmp_path / "run")) == undisturbed


@pytest.mark.usefixtures("tracing")
def test_whole_rounds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SAVE_SECONDS", 3600)
    interrupt(tmp_path / "run", "profcil.engine.channel:Channel.round", 4)
    assert [(e["event"], e["position"], e["round"]) for e in events(tmp_path / "run")] == [
        ("round", 0, 0),
        ("round", 0, 1),
        ("position", 0, 1),
        ("round", 1, 0),
    ]


@pytest.mark.usefixtures("tracing")
def test_in_the_warm_up(tmp_path: Path, undisturbed_by: Callable[[str], dict]) -> None:
    out = tmp_path / "run"
    assert "start it again" in interrupt(out, TRAIN, 2)
    with pytest.raises(RunFolderError, match="no state yet"):
        run.resume(out)
    assert outcome(run.start(tiny(accelerate="off"), out, tmp_path)) == undisturbed_by("off")


def command(tmp_path: Path, verb: str = "run") -> list[str]:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny(accelerate="off")))
    paths = [str(recipe), "--out", str(tmp_path / "run")] if verb == "run" else [str(tmp_path / "run")]
    return [verb, *paths, "--data-dir", str(tmp_path), "--quiet"]


STOPS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("stop, status", STOPS)
def test_a_scheduler_or_a_closed_terminal_ends_a_run_like_ctrl_c(
    stop: signal.Signals,
    status: int,
    tmp_path: Path,
    undisturbed_by: Callable[[str], dict],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recorder, "SAVE_SECONDS", 3600)
    monkeypatch.setattr(recorder, "MIN_SAVE_SECONDS", 3600)
    before = signal.getsignal(stop)
    for verb, call, rounds in (("run", 5, 1), ("resume", 3, 2)):  # 1-2 warm-up, then two clients a round
        with pytest.MonkeyPatch.context() as patch:
            at_call(TRAIN, call, lambda *_: signal.raise_signal(stop), patch.setattr)
            assert main(command(tmp_path, verb)) == status
        assert f"`profcil resume {tmp_path / 'run'}`" in capsys.readouterr().err
        assert sum(event["event"] == "round" for event in events(tmp_path / "run")) == rounds
    assert signal.getsignal(stop) is before
    assert outcome(run.resume(tmp_path / "run")) == undisturbed_by("off")


@pytest.mark.usefixtures("tracing")
def test_a_run_under_nohup_ignores_a_closed_terminal(
    tmp_path: Path, undisturbed_by: Callable[[str], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    with signal_handlers({signal.SIGHUP: signal.SIG_IGN}):
        at_call(TRAIN, 5, lambda *_: signal.raise_signal(signal.SIGHUP), monkeypatch.setattr)
        assert main(command(tmp_path)) == 0
    assert outcome(tmp_path / "run") == undisturbed_by("off")


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("stop, status", STOPS)
def test_a_signal_that_comes_while_the_run_saves_waits(
    stop: signal.Signals, status: int, tmp_path: Path, undisturbed_by: Callable[[str], dict]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_call("profcil.engine.loop:evaluate", 2, lambda *_: signal.raise_signal(stop), patch.setattr)
        at_call("profcil.engine.run:RunRecorder.save", 3, lambda *_: signal.raise_signal(stop), patch.setattr)
        assert main(command(tmp_path)) == status
    assert outcome(run.resume(tmp_path / "run")) == undisturbed_by("off")
