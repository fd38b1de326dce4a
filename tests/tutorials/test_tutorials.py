"""The notebooks of the documentation run from the first cell to the last, and end with what their text says."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from profcil.cli.main import main
from profcil.runs.reader import load_run

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

from notebooks import Cell, read_cells, to_markdown  # noqa: E402

NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def run_notebook(name: str) -> tuple[dict[str, Any], list[Any]]:
    """The variables at the end, and what a notebook would show: the value of each cell that ends with one."""
    variables: dict[str, Any] = {}
    shown = [run_cell(cell, variables) for cell in read_cells(DOCS / "tutorials" / f"{name}.ipynb") if cell.is_code]
    return variables, [value for value in shown if value is not None]


def run_cell(cell: Cell, variables: dict[str, Any]) -> Any:
    if cell.is_command:
        words = shlex.split(cell.text[1:])
        assert words[0] == "profcil"
        assert main(words[1:]) == 0, cell.text
        return None
    *statements, last = ast.parse(cell.text).body
    if not isinstance(last, ast.Expr):
        statements.append(last)
    exec(compile(ast.Module(statements, []), "notebook", "exec"), variables)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "notebook", "eval"), variables)


def test_there_are_four() -> None:
    names = ["add-a-method", "bring-your-data", "deploy-two-sites", "reproduce-a-table"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_begins_with_a_title(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert to_markdown(path).startswith("# ")


def test_reproduce_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    variables, (table, run) = run_notebook("reproduce-a-table")
    assert {row["method"] for row in table.rows} == {"fedavg", "promax"} and table.failures == {}
    assert "<table>" in table._repr_html_() and "<table>" in run._repr_html_()
    printed = capsys.readouterr().out
    assert "PRO-MAX" in printed and printed.count("worst client") == len(variables["runs"]) == 4
    assert "PRO-MAX" in Path("severe.html").read_text(encoding="utf-8")


def test_add_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    variables, (*_, table) = run_notebook("add-a-method")
    fedavg, without, with_margin = (run.metrics for run in variables["runs"])
    assert without == fedavg  # as the text says
    assert with_margin["af"] < fedavg["af"] - 5
    assert "FedAvg" in repr(table) and "margin" in repr(table)


def test_bring_your_data(capsys: pytest.CaptureFixture[str]) -> None:
    variables, shown = run_notebook("bring-your-data")
    wines, (classes, sure), images = shown
    assert wines.metrics["faa"] > 85 and images.metrics["faa"] > 85
    assert len(classes) == len(sure.values) == 3
    assert variables["confusion"].sum() == wines.scores.total.sum()


def test_deploy_two_sites(capsys: pytest.CaptureFixture[str]) -> None:
    run_notebook("deploy-two-sites")
    printed = capsys.readouterr().out
    assert printed.count("the site can join; nothing was sent") == 2
    assert load_run("runs/trial").metrics["faa"] > 85


def test_a_page_of_the_site_has_the_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "A text."]},
        {"cell_type": "code", "source": ["a = 1\n", "a"]},
        {"cell_type": "code", "source": ["!profcil doctor"]},
    ]
    file = tmp_path / "one.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    parts = ["# Title", "[Download this page as a notebook.](one.ipynb)", "A text."]
    assert to_markdown(file).split("\n\n") == [*parts, "```python\na = 1\na\n```", "```\nprofcil doctor\n```\n"]
