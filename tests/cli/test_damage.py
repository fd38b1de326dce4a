"""Files of a run that were edited or damaged: one sentence, and nothing is overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.studies.scheduler import read_last_line


@pytest.fixture
def hurt(runs: dict[str, Path]) -> Path:
    """A copy of a finished run, to be harmed."""
    shutil.copytree(runs["pro"], "hurt")
    Path("hurt/diagnostics.json").write_text("{}")
    return Path("hurt")


def sentence(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(list(line)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("profcil: ") and err.count("\n") == 1 and "unexpected" not in err
    return err


def edited(folder: Path) -> None:
    text = (folder / "config.toml").read_text()
    assert "\nseed = 0\n" in text
    (folder / "config.toml").write_text(text.replace("\nseed = 0\n", "\nseed = 1\n"))


@pytest.mark.parametrize("verb", [["diagnose"], ["resume"], ["compare"], ["figure", "explain"]])
def test_an_edited_config_is_told(capsys: pytest.CaptureFixture[str], hurt: Path, verb: list[str]) -> None:
    edited(hurt)
    said = sentence(capsys, *verb, "hurt")
    assert "hurt/config.toml has seed = 1, but the run started with 0; restore that value" in said
    assert Path("hurt/diagnostics.json").read_text() == "{}"


def test_diagnose_believes_the_state(capsys: pytest.CaptureFixture[str], hurt: Path) -> None:
    """Even where all readable files tell the same tale."""
    edited(hurt)
    facts = json.loads((hurt / "run.json").read_text())
    facts["config"]["seed"] = 1
    (hurt / "run.json").write_text(json.dumps(facts))
    assert "the run started with 0" in sentence(capsys, "diagnose", "hurt")


def test_diagnose_wants_the_data_of_the_run(
    capsys: pytest.CaptureFixture[str], hurt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from profcil.data import digits

    load = digits.load

    def other(root: Path, seed: int):
        bundle = load(root, seed)
        return replace(bundle, train=replace(bundle.train, x=bundle.train.x.flip(0)))

    monkeypatch.setattr(digits, "load", other)
    assert "is not what hurt began with; give the same --data-dir" in sentence(capsys, "diagnose", "hurt")


def put(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None  # type: ignore[func-returns-value]


def add(name: str, data: bytes) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.write(data)

    return harm


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


HARMS = {
    "empty run.json": put("run.json", b""),
    "run.json a list": put("run.json", b"[]"),
    "run.json too deep": put("run.json", b"[" * 100_000),
    "empty config.toml": put("config.toml", b""),
    "config.toml no TOML": put("config.toml", b"x"),
    "event a list": add("events.jsonl", b"[]\n"),
    "event without a name": add("events.jsonl", b"{}\n"),
    "event no UTF-8": add("events.jsonl", b'{"event": "\xff"}\n'),
    "events lost": lose("events.jsonl"),
    "half an event": add("events.jsonl", b'{"event": "pos'),
}
LIVE = ("events lost", "half an event")  # as a run that has just begun, or is writing, looks


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.parametrize("verb", [["diagnose"], ["figure", "explain"], ["status"]])
def test_damaged_files_are_told(capsys: pytest.CaptureFixture[str], hurt: Path, verb: list[str], name: str) -> None:
    HARMS[name](hurt)
    if verb == ["status"] and name in LIVE:
        assert main(["status", "hurt"]) == 0
        return
    assert "hurt" in (said := sentence(capsys, *verb, "hurt"))
    assert "cannot be read (" in said or "do not belong together" in said
    assert Path("hurt/diagnostics.json").read_text() == "{}"


def test_a_log_of_any_bytes_has_last_words(tmp_path: Path) -> None:
    (tmp_path / "cell.log").write_bytes(b"\xff\nprofcil: not applicable: \xff\n")
    assert read_last_line(tmp_path / "cell.log").startswith("not applicable")
