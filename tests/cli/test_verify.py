"""A finished run whose files were changed is noticed by `profcil verify` and by everything that reads it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profcil.cli.main import main
from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_tensors, write_tensors
from profcil.runs.digests import digest, with_digests
from profcil.runs.reader import load_run
from profcil.runs.verify import find_faults

READERS = (["compare"], ["table", "severe"], ["report", "--out", "page.html"], ["results", "add"])


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["pro"], tmp_path / "pro"))


def lines_of(capsys: pytest.CaptureFixture[str], *line: str, status: int) -> list[str]:
    capsys.readouterr()
    assert main(list(map(str, line))) == status
    return [text for text in "".join(capsys.readouterr()).splitlines() if text]


def change_digit(path: Path, number: int) -> None:
    """Changes one digit of a text file by one."""
    text = path.read_text()
    digits = [match.start() for match in re.finditer(r"\d", text)]
    at = digits[number % len(digits)]
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def test_an_unchanged_run_has_no_fault(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(capsys, "verify", run, status=0) == [f"{run}: ok"]


@pytest.mark.parametrize("name", ["scores.json", "ledger.csv", "run.json", "events.jsonl"])
def test_a_changed_digit_is_noticed_by_every_reader(
    run: Path, name: str, capsys: pytest.CaptureFixture[str], runs: dict[str, Path]
) -> None:
    change_digit(run / name, 10)
    for verb in READERS:
        text = "\n".join(lines_of(capsys, *verb, run, status=2))
        assert str(run / name) in text and "profcil resume" in text and "unexpected" not in text
    faults = lines_of(capsys, "verify", run, runs["fedavg"], status=1)
    assert any(str(run / name) in fault for fault in faults)
    assert faults[-1] == f"{runs['fedavg']}: ok"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["scores.json", "ledger.csv", "run.json"]), st.integers(0, 10**6))
def test_any_changed_digit_is_an_error(runs: dict[str, Path], tmp_path: Path, name: str, number: int) -> None:
    run = tmp_path / "changed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(runs["pro"], run)
    change_digit(run / name, number)
    with pytest.raises(RunFolderError):
        load_run(run)


def test_a_changed_digit_that_leaves_the_value_is_an_error(run: Path) -> None:
    """0.30000000000000004 and 0.30000000000000005 are the same number."""
    facts = json.loads((run / "run.json").read_text())
    facts.pop("digests")
    text = json.dumps(with_digests({**facts, "seconds": 0.1 + 0.2}, {}))
    (run / "run.json").write_text(text)
    assert load_run(run).done
    (run / "run.json").write_text(text.replace("0.30000000000000004", "0.30000000000000005"))
    with pytest.raises(RunFolderError, match=r"run\.json"):
        load_run(run)


def test_resume_restores_what_was_changed(run: Path, runs: dict[str, Path]) -> None:
    for name in ("scores.json", "ledger.csv", "run.json", "events.jsonl"):
        change_digit(run / name, 5)
    assert main(["resume", str(run), "--quiet"]) == 0
    assert find_faults(run) == []
    assert (run / "run.json").read_bytes() == (runs["pro"] / "run.json").read_bytes()


def without_digests(run: Path) -> dict:
    """A run as an older version wrote it; its facts."""
    facts = json.loads((run / "run.json").read_text())
    facts.pop("digests")
    (run / "run.json").write_text(json.dumps(facts))
    return facts


def test_a_run_without_digests_can_be_read(run: Path) -> None:
    without_digests(run)
    assert load_run(run).done
    assert find_faults(run) == []


def test_more_correct_predictions_than_examples_are_refused_without_digests(run: Path) -> None:
    without_digests(run)
    scores = json.loads((run / "scores.json").read_text())
    scores["correct"][-1][0] = scores["total"][0] + 22
    (run / "scores.json").write_text(json.dumps(scores))
    with pytest.raises(RunFolderError, match=r"scores\.json has \d+ correct of \d+ for task 1 at position 2"):
        load_run(run)


def test_verify_recomputes_metrics_and_bytes_where_there_are_no_digests(run: Path) -> None:
    (run / "state.safetensors").unlink()
    facts = without_digests(run)
    facts["metrics"]["cta"] += 0.01
    facts["bytes"] -= 1
    (run / "run.json").write_text(json.dumps(facts))
    metrics, size = find_faults(run)
    assert "run.json has cta = " in metrics and "ledger.csv sums to" in size


def test_verify_compares_files_with_the_state_where_there_are_no_digests(run: Path) -> None:
    without_digests(run)
    text = (run / "ledger.csv").read_text()
    swapped = text.replace(",down,", ",DOWN,").replace(",up,", ",down,").replace(",DOWN,", ",up,")
    (run / "ledger.csv").write_text(swapped)
    assert any("ledger.csv does not follow from the saved state" in fault for fault in find_faults(run))


@pytest.mark.parametrize("name", ["config.toml", "plan.npz", "state.safetensors", "model.safetensors"])
def test_verify_looks_at_every_other_file(run: Path, name: str) -> None:
    if name == "model.safetensors":
        tensors, _ = read_tensors(run / "state.safetensors") or ({}, {})
        write_tensors(run / name, tensors, {})
        assert find_faults(run) == []
    if name == "config.toml":
        text = (run / name).read_text()
        (run / name).write_text(text.replace("\nseed = 0\n", "\nseed = 1\n"))
    else:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 1
        (run / name).write_bytes(data)
    assert any(name in fault for fault in find_faults(run))


def test_verify_names_what_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "events.jsonl").unlink()
    assert "events.jsonl is missing" in find_faults(run)[0]
    (line,) = lines_of(capsys, "verify", run.parent / "nowhere", status=1)
    assert "nowhere does not exist" in line
    (row,) = json.loads("".join(lines_of(capsys, "verify", run, "--json", status=1)))
    assert row["run"] == str(run) and not row["ok"] and len(row["faults"]) == 1


def test_a_run_that_is_killed_between_two_files_can_be_read(run: Path) -> None:
    """Then run.json is that of the state before, and not done."""
    facts = json.loads((run / "run.json").read_text())
    facts.pop("digests")
    facts["done"] = False
    (run / "run.json").write_text(json.dumps(with_digests(facts, {"scores.json": digest(b"earlier")})))
    assert not load_run(run).done
