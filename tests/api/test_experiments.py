"""Studies, sweeps and comparisons from Python."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import profcil
from profcil.errors import ConfigError, DataError
from profcil.runs import reader

TINY = {"train.rounds": 1, "epochs": 1, "warmup.rounds": 1, "clients": 4, "participants": 2, "task_size": 5}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))
    monkeypatch.delenv("PROFCIL_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs that differ in a setting."""
    root = tmp_path_factory.mktemp("runs")
    for lr in (0.01, 0.02):
        profcil.run("digits", method="fedavg", out=root / str(lr), settings=TINY | {"lr": lr})
    return root


def stand_in_for_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pandas is no dependency: a frame is then the list of its rows."""
    monkeypatch.setattr(reader, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))


def test_a_comparison_shows_runs_and_the_settings_that_differ(folder, monkeypatch):
    first = profcil.load_run(folder / "0.01")
    for given in ([folder], [first, folder / "0.02"]):
        table = profcil.compare(given)
        assert [row["settings"] for row in table.rows] == [{"train.lr": 0.01}, {"train.lr": 0.02}]
        assert table.rows[0]["faa"] == first.metrics["faa"]
    assert "FedAvg" in repr(table) and "(lr=0.01)" in repr(table) and "not shown: " in repr(table)
    assert max(map(len, repr(table).splitlines())) <= 80
    assert table._repr_html_().startswith("<table><tr><th>method</th>")
    with pytest.raises(ConfigError, match="or use the attribute rows"):
        monkeypatch.setattr(reader, "find_spec", lambda name: None)
        table.to_frame()
    stand_in_for_pandas(monkeypatch)
    frame = table.to_frame()
    assert [row["train.lr"] for row in frame] == [0.01, 0.02] and frame[0]["faa"] == first.metrics["faa"]


def test_a_comparison_has_clients_and_transfer(folder):
    run = profcil.load_run(folder / "0.01")
    row = profcil.compare([run]).rows[0]
    assert {name: row[name] for name in run.further_metrics} == run.further_metrics
    assert row["worst_client"] == pytest.approx(np.nanmin(run.client_accuracy()))
    assert row["client_sd"] == pytest.approx(np.nanstd(run.client_accuracy())) and row["bwt"] <= 0


def test_the_confusion_matrix_has_the_right_answers_of_the_run_on_its_diagonal(folder):
    run = profcil.load_run(folder / "0.01")
    names, matrix = run.confusion()
    assert names == profcil.load_data("digits").names and matrix.sum() == run.scores.total.sum()
    right = [sum(matrix[label, label] for label in task) for task in run.plan.tasks]
    assert right == run.scores.correct[-1].tolist()


def test_nothing_to_compare():
    with pytest.raises(ConfigError, match="no runs to compare"):
        profcil.compare([])


def test_a_study_from_a_dict_is_run_and_reused(monkeypatch):
    values = {"methods": ["fedavg"], "seeds": [0, 1], "set": [f"{key}={value}" for key, value in TINY.items()]}
    table = profcil.study(values, settings={"lr": 0.02}, out="cells")
    (row,) = table.rows
    assert row["seeds"] == 2 and table.failures == {} and table.folder == Path("cells")
    assert "fedavg" in repr(table) and "<td>fedavg</td>" in table._repr_html_()
    made = {path: path.stat().st_mtime_ns for path in Path("cells").rglob("*")}
    again = profcil.study(values, settings={"lr": 0.02}, out="cells", seeds=[1])
    assert again.rows[0]["seeds"] == 1
    assert {path: path.stat().st_mtime_ns for path in Path("cells").rglob("*")} == made
    stand_in_for_pandas(monkeypatch)
    (flat,) = table.to_frame()
    assert (flat["faa"], flat["faa_sd"]) == row["faa"][:2]


def test_a_failed_run_is_reported_and_the_others_are_shown():
    values = {"methods": ["fedavg"], "set": [f"{key}={value}" for key, value in TINY.items()]}
    values["variants"] = [{"name": "fine"}, {"name": "bad", "set": ["loss_limit=0.0"]}]
    table = profcil.study(values, out="cells")
    (message,) = table.failures.values()
    assert "diverged" in message and f"failed: {next(iter(table.failures))}: {message}" in repr(table)
    assert [row["seeds"] for row in table.rows] == [1, 0]


def test_a_script_without_a_main_guard_can_sweep(tmp_path):
    """Each run is a process of its own, which must not execute the script again."""
    settings = TINY | {"lr": [0.01, 0.02]}
    lines = ["import profcil", "print('once')", f"print(profcil.sweep(method='fedavg', settings={settings}, jobs=2))"]
    (tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    once, head, first, second = done.stdout.splitlines()
    assert (once, head.split()[:3]) == ("once", ["lr", "seeds", "FAA"]), done.stderr
    assert first.split()[:2] == ["0.01", "1"] and second.split()[:2] == ["0.02", "1"]


def test_mistakes():
    with pytest.raises(DataError, match="5 runs cannot start: Cora's"):
        profcil.study({"datasets": ["cora"], "methods": ["fedavg"], "seeds": [0, 1, 2, 3, 4]}, data="empty")
    with pytest.raises(ConfigError, match="unknown setting 'method' in the study; did you mean methods"):
        profcil.study({"method": ["fedavg"]})
    with pytest.raises(ConfigError, match=r"profcil.sweep has no argument 'noise'; give a setting as settings="):
        profcil.sweep(noise=[0.1, 0.2])
    with pytest.raises(ConfigError, match="jobs is 0"):
        profcil.sweep(seed=[0, 1], jobs=0)
    assert not Path("runs").exists()
