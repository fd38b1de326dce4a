"""What new users stumbled over in their first hours, a test for each (A1 to A12, then smaller things). Other files test
the parts in depth; these fail if one of the stumbling blocks comes back."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import profcil
from profcil.cli.main import main
from profcil.errors import ConfigError
from profcil.reporting import tables
from profcil.reporting.groups import group_runs
from profcil.reporting.page.data import page_data
from profcil.runs import reader
from profcil.runs.reader import load_run
from profcil.runs.results.store import load_store

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def noises(small: list[str], capsys: Capture) -> Path:
    """Two runs of PRO that differ in one setting that changes the result, and in one that does not."""
    for number, extra in enumerate((["noise=0.1"], ["noise=0.9", "keep_memories=true"])):
        sets = [part for item in extra for part in ("--set", item)]
        assert main(["run", "--method", "pro", "--out", f"runs/{number}", "--quiet", *small, *sets]) == 0
    capsys.readouterr()
    return Path("runs")


def test_a1_every_view_names_the_setting_that_differs_and_no_other(noises: Path, capsys: Capture) -> None:
    runs = [load_run(noises / name) for name in ("0", "1")]
    names = ["PRO (noise=0.1)", "PRO (noise=0.9)"]
    assert main(["compare", str(noises)]) == 0
    compared = capsys.readouterr().out
    assert all(name in compared for name in names) and "keep_memories" not in compared
    assert [group.label for group in group_runs(runs)] == names  # of figures
    assert sorted(group["label"] for group in page_data(runs)["groups"]) == names


def test_a2_a_method_has_one_colour_whatever_is_beside_it(runs: dict[str, Path], noises: Path) -> None:
    alone = page_data([load_run(noises / "0")])["groups"]
    beside = page_data([load_run(path) for path in (runs["fedavg"], runs["pro"], noises / "1")])["groups"]
    looks = {(group["look"], group["marker"]) for group in (*alone, *beside) if group["method"] == "pro"}
    assert len(looks) == 1


def test_a3_a_run_fits_a_screen_and_is_a_table_in_a_notebook(runs: dict[str, Path]) -> None:
    run = load_run(runs["pro"])
    assert len(repr(run)) < 600 and repr(run).count("\n") < 8
    assert run._repr_html_().startswith("<table>")


def test_a4_missing_data_is_said_once_and_before_the_first_run(capsys: Capture) -> None:
    line = ["study", "severe", "--data-dir", "empty", "--methods", "fedavg,pro", "--out", "cells"]
    assert main([*line, "--dry-run"]) == 0
    assert "cifar100" in capsys.readouterr().err
    assert main(line) == 2
    assert capsys.readouterr().err.count("was not found") == 1


def test_a5_people_read_positions_and_tasks_from_1(small: list[str], capsys: Capture) -> None:
    assert main(["plan", *small]) == 0
    plan = capsys.readouterr().out
    assert "task 1:" in plan and "task 0:" not in plan and re.search(r"client +p1 +p2\n", plan)
    assert main(["run", "--method", "fedavg", "--out", "one", "--log", "csv", *small]) == 0
    said = capsys.readouterr().err
    assert "position 1 of 2" in said and "position 2 of 2" in said and "position 0" not in said
    with open("one/logs/positions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["position"] for row in rows] == ["1", "2"] and "tasks/1" in rows[0] and "tasks/0" not in rows[0]


@pytest.mark.slow
def test_a6_the_obvious_command_gives_the_number_of_the_readme(capsys: Capture) -> None:
    """PRO-LIN on digits, seed by seed, as the results store has it."""
    assert main(["run", "--method", "prolin", "--seed", "0", "--out", "obvious", "--quiet"]) == 0
    found = load_run("obvious").metrics["faa"]
    (recorded,) = [
        run.values["faa"]
        for run in load_store(ROOT / "results" / "digits.csv")
        if (run.config["method"], run.config["setting"], run.config["seed"]) == ("prolin", "severe", 0)
        and run.values["part"] == "test"
    ]
    assert found == pytest.approx(recorded, abs=1.0)


def test_a7_accuracy_is_shown_while_a_run_is_computed(small: list[str], capsys: Capture) -> None:
    assert main(["run", "--method", "fedavg", "--out", "one", "--log", "csv", *small]) == 0
    said = capsys.readouterr().err
    assert re.search(r"position 1 of 2 done: FAA \d+\.\d, CTA \d+\.\d, AF \d+\.\d, \d.*sent", said)
    header = Path("one/logs/positions.csv").read_text().splitlines()[0]
    assert all(name in header for name in ("faa", "cta", "af", "bytes"))


def test_a8_several_values_are_a_grid(small: list[str], capsys: Capture) -> None:
    line = ["run", "--method", "pro", "--set", "noise=0.1,0.2", "--seed", "0,1", "--dry-run", "--out", "grid", *small]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert "4 runs" in out + err and not Path("grid").exists()
    assert "[[variants]]" in (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


def test_a9_the_status_of_a_plain_run_names_no_replies(runs: dict[str, Path], capsys: Capture) -> None:
    assert main(["status", str(runs["pro"])]) == 0
    said = capsys.readouterr().out
    assert "simulation" in said and "replies by client" not in said and "problems" not in said


def test_a10_a_misconfigured_site_gets_an_error_before_it_joins(capsys: Capture) -> None:
    Path("site").mkdir()
    Path("site/manifest.toml").write_text('site = "a"\ndata = "missing.csv"\n[[position]]\nclasses = ["x"]\n')
    terms = 'modality = "table"\ntasks = [["x"], ["y"]]\nsites = ["a"]\ncolumns = ["c"]\nmean = [0.0]\nstd = [1.0]\n'
    Path("federation.toml").write_text(terms)
    assert main(["deploy", "check", "site", "--federation", "federation.toml"]) == 2
    out, err = capsys.readouterr()
    assert "missing.csv" in out + err and "Traceback" not in err


def test_a11_an_equal_run_is_reused_and_said(small: list[str], capsys: Capture) -> None:
    line = ["run", "--method", "fedavg", "--quiet", *small]
    assert main(line) == 0
    before = sorted(Path("runs").iterdir())
    assert main(line) == 0
    assert "reused: " in "".join(capsys.readouterr()) and sorted(Path("runs").iterdir()) == before


def test_a12_a_setting_as_an_argument_is_pointed_to_settings() -> None:
    with pytest.raises(ConfigError, match=r"settings=\{'rounds': 1\}"):
        profcil.run("digits", rounds=1)


# -- smaller things ----------------------------------------------------------------------------------------------------


def test_tables_are_not_wrapped_in_a_pipe(runs: dict[str, Path], capsys: Capture) -> None:
    assert main(["compare", *map(str, runs.values())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[0]) > 80 and lines[0].split()[0] == "method"
    assert sum(line.startswith(("FedAvg", "PRO")) for line in lines) == 4  # three runs, a mean of two


def test_a_study_on_a_terminal_is_no_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True, write=len, flush=lambda: None))
    assert "|" not in tables.text_table(["method", "FAA"], [["PRO", "1.0"]])


def test_help_can_be_pasted_into_a_shell(capsys: Capture) -> None:
    assert main(["list", "--help"]) == 0
    assert not re.search(r"methods *\|", capsys.readouterr().out)
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"profcil list \w+ \|", page.read_text(encoding="utf-8"))


def test_the_duration_of_the_tests_is_named() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(r"make test\b[^\n]*\n?[^\n]*minutes", text), page


def test_one_is_singular(runs: dict[str, Path], capsys: Capture) -> None:
    assert main(["report", str(runs["pro"]), "--out", "page.html"]) == 0
    assert capsys.readouterr().out.strip().endswith(": 1 run")
    assert "1 seeds" not in Path("page.html").read_text(encoding="utf-8")


# -- what was absent ---------------------------------------------------------------------------------------------------


def test_fairness_transfer_confusion_and_frames_are_there(
    runs: dict[str, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(runs["pro"])
    assert set(run.further_metrics) == {"worst_client", "client_sd", "bwt", "fwt"}
    assert len(run.client_accuracy()) == run.plan.clients
    names, confusion = run.confusion()
    assert len(names) == 10 and np.trace(confusion) == run.scores.correct[-1].sum()
    frames = SimpleNamespace(RangeIndex=lambda *bounds, name: (name, *bounds), DataFrame=lambda rows, **axes: rows)
    monkeypatch.setattr(reader, "import_pandas", lambda instead: frames)
    assert run.to_frame().shape == (2, 2)
    assert main(["compare", "--further", str(runs["pro"])]) == 0
    assert all(title in capsys.readouterr().out for title in ("worst client",))
    assert main(["compare", "--json", str(runs["pro"])]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["worst_client"] == pytest.approx(run.further_metrics["worst_client"])
