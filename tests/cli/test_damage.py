"""Edited or damaged files of a run are reported in one sentence, and nothing is overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.studies.scheduler import read_last_line


@pytest.fixture
def damaged(runs: dict[str, Path]) -> Path:
    """A copy of a finished run, to be damaged."""
    shutil.copytree(runs["pro"], "damaged")
    Path("damaged/diagnostics.json").write_text("{}")
    return Path("damaged")


def error_of(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(list(line)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("profcil: ") and err.count("\n") == 1 and "unexpected" not in err
    return err


def edit_seed(folder: Path) -> None:
    text = (folder / "config.toml").read_text()
    assert "\nseed = 0\n" in text
    (folder / "config.toml").write_text(text.replace("\nseed = 0\n", "\nseed = 1\n"))


@pytest.mark.parametrize("verb", [["diagnose"], ["resume"], ["compare"], ["figure", "explain"]])
def test_edited_config_is_reported(capsys: pytest.CaptureFixture[str], damaged: Path, verb: list[str]) -> None:
    edit_seed(damaged)
    message = error_of(capsys, *verb, "damaged")
    assert "damaged/config.toml has seed = 1, but the run started with 0; restore that value" in message
    assert Path("damaged/diagnostics.json").read_text() == "{}"


def test_diagnose_trusts_the_saved_state(capsys: pytest.CaptureFixture[str], damaged: Path) -> None:
    """Even if config.toml and run.json agree with each other."""
    edit_seed(damaged)
    facts = json.loads((damaged / "run.json").read_text())
    facts["config"]["seed"] = 1
    facts.pop("digests")
    (damaged / "run.json").write_text(json.dumps(facts))
    assert "the run started with 0" in error_of(capsys, "diagnose", "damaged")


def test_diagnose_needs_the_data_of_the_run(
    capsys: pytest.CaptureFixture[str], damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from profcil.data import digits

    load = digits.load

    def load_other(root: Path, seed: int):
        bundle = load(root, seed)
        return replace(bundle, train=replace(bundle.train, x=bundle.train.x.flip(0)))

    monkeypatch.setattr(digits, "load", load_other)
    assert "is not what damaged began with; give the same --data-dir" in error_of(capsys, "diagnose", "damaged")


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None  # type: ignore[func-returns-value]


def append(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.write(data)

    return damage


def delete(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGES = {
    "empty run.json": write("run.json", b""),
    "run.json a list": write("run.json", b"[]"),
    "run.json too deep": write("run.json", b"[" * 100_000),
    "empty config.toml": write("config.toml", b""),
    "config.toml not TOML": write("config.toml", b"x"),
    "event a list": append("events.jsonl", b"[]\n"),
    "event without a name": append("events.jsonl", b"{}\n"),
    "event not UTF-8": append("events.jsonl", b'{"event": "\xff"}\n'),
    "no events": delete("events.jsonl"),
    "half an event": append("events.jsonl", b'{"event": "pos'),
}
NORMAL_WHILE_RUNNING = ("no events", "half an event")  # before the first event, and during a write


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("verb", [["diagnose"], ["figure", "explain"], ["status"]])
def test_damage_is_reported(capsys: pytest.CaptureFixture[str], damaged: Path, verb: list[str], name: str) -> None:
    DAMAGES[name](damaged)
    if verb == ["status"] and name in NORMAL_WHILE_RUNNING:
        assert main(["status", "damaged"]) == 0
        return
    message = error_of(capsys, *verb, "damaged")
    assert "damaged" in message
    assert "cannot be read (" in message or "do not belong together" in message
    assert Path("damaged/diagnostics.json").read_text() == "{}"


def test_last_line_of_a_log_with_invalid_bytes(tmp_path: Path) -> None:
    (tmp_path / "cell.log").write_bytes(b"\xff\nprofcil: not applicable: \xff\n")
    assert read_last_line(tmp_path / "cell.log").startswith("not applicable")
