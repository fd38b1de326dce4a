"""Studies, diagnosis and the bench, on tiny digits streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.study import cells, load_study

SMALL = '["train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=2", "task_size=5"]'
STUDY = f"""
datasets = ["digits"]
methods = ["fedavg", "promax"]
seeds = [0, 1]
set = {SMALL}
diagnose = true

[[variants]]
name = ""

[[variants]]
name = "no noise"
methods = ["promax"]
set = ["noise=0.0"]
"""


@pytest.fixture
def study(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    return str(path)


def test_a_study_runs_what_is_missing_and_reuses_the_rest(study, capsys):
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"fedavg", "promax", "promax (no noise)"}
    assert all(row["seeds"] == 1 and 0 <= row["faa"][0] <= 100 for row in rows.values())
    assert rows["fedavg"]["norm_comm"] == [1.0, 0.0] and rows["fedavg"]["centred"] is None
    assert rows["promax"]["probe_final"][0] > 20 and -1 <= rows["promax"]["centred"][0] <= 1
    made = {p: p.stat().st_mtime_ns for p in Path("cells").rglob("*")}
    assert main(["study", study, "--out", "cells", "--seeds", "0"]) == 0
    out, err = capsys.readouterr()
    assert "3 runs, 0 of them to do" in err and "promax (no noise)" in out and "run folders: cells" in out
    assert {p: p.stat().st_mtime_ns for p in Path("cells").rglob("*")} == made


def test_a_run_that_fails_does_not_stop_the_rest_and_is_not_filled_in(study, capsys):
    text = Path(study).read_text().replace('["noise=0.0"]', '["noise=0.0", "train.loss_limit=0.0"]')
    Path(study).write_text(text)
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--methods", "promax", "--json"]) == 1
    out, err = capsys.readouterr()
    rows = {row["method"]: row for row in json.loads(out)}
    assert "diverged" in err
    assert rows["promax"]["seeds"] == 1 and rows["promax (no noise)"]["seeds"] == 0
    assert rows["promax (no noise)"]["faa"] is None


def test_a_dry_run_counts_and_writes_nothing(study, capsys):
    assert main(["study", study, "--out", "cells", "--dry-run"]) == 0
    assert "6 runs, 6 of them to do" in capsys.readouterr().err
    assert not Path("cells").exists()


def test_cells_differ_where_a_result_could_and_only_there(study):
    todo = cells(load_study(study))
    assert len({cell.name for cell in todo}) == 6
    Path(study).write_text(STUDY.replace('"train.rounds=1"', '"train.rounds=1", "workers=2"'))
    assert [cell.name for cell in cells(load_study(study))] == [cell.name for cell in todo]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["study", "demmo"], "demo"),
        (["study", "missing.toml"], "does not exist"),
        (["study"], "study"),
        (["diagnose", "nowhere"], "not a finished run"),
    ],
)
def test_mistakes_are_sentences(line, says, capsys):
    assert main(line) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_key_of_a_study_is_named(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('method = ["pro"]\n')
    assert main(["study", str(tmp_path / "mine.toml")]) == 2
    assert "methods" in capsys.readouterr().err


def test_diagnose_tells_probe_and_alignment_and_keeps_them(runs, capsys):
    assert main(["diagnose", str(runs["pro"]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((runs["pro"] / "diagnostics.json").read_text())
    assert report["probe_warm"]["ridge"] > 20 and len(report["alignment"]) == 2
    assert main(["diagnose", str(runs["pro"])]) == 0
    assert "warmed base: ridge" in capsys.readouterr().out


def test_the_bench_measures_a_plan(capsys):
    assert main(["bench", "plan", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out).values()
    assert case["seconds"] > 0


def test_the_bench_says_what_it_could_not_measure(capsys):
    assert main(["bench", "promax on cora"]) == 0
    assert "cora" in capsys.readouterr().out.lower()


def test_every_built_in_study_is_listed_and_resolves(capsys):
    assert main(["list", "studies", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["demo"]["runs"] == 2 and all(row["runs"] > 0 and row["title"] for row in rows.values())
