"""The page of methods is generated from the methods, and the committed page is up to date."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from profcil import registry
from profcil.cli.main import main
from profcil.methods.fedcbdr import FedCBDR
from profcil.reporting import methods
from profcil.reporting.methods import (
    BEGIN,
    END,
    budget,
    describe_tests,
    read_experiments,
    render_page,
    split_docstring,
    stored,
    table_row,
)

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "methods.md"
DOC = """Name (Who, 2020): what it is.

Something first.

Kept: one thing;
and another.

Stored: on the server a list; on a client nothing.

Adapted to orders: this, and
it goes on: here.

More of it.
Left out: that.
Uncertain: much.
"""


def test_the_committed_page_is_up_to_date():
    """Update it with `profcil list methods --page docs/methods.md`."""
    assert COMMITTED.read_text(encoding="utf-8") == render_page(ROOT / "tests" / "methods", read_experiments(COMMITTED))


def test_every_method_has_a_complete_row_and_a_section():
    text = COMMITTED.read_text(encoding="utf-8")
    for name in registry.names("methods"):
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for mark in ("Loss", "Choose it when", "Stored"):
            assert f"**{mark}:** " in section, name
        (loss,) = [line for line in section.splitlines() if line.startswith("**Loss:**")]
        assert loss.count("$`") == loss.count("`$") > 0
        cells = table_row(name, registry.find("methods", name))
        assert "?" not in cells and all(cells)


def test_a_docstring_is_split_at_its_marks():
    title, parts = split_docstring(DOC)
    assert title == "Name (Who, 2020): what it is."
    assert parts == [
        ("", "Something first."),
        ("Kept", "one thing; and another."),
        ("Stored", "on the server a list; on a client nothing."),
        ("Adapted to orders", "this, and it goes on: here."),
        ("", "More of it."),
        ("Left out", "that."),
        ("Uncertain", "much."),
    ]
    assert stored(DOC) == ("a list", "nothing")
    assert stored("Nothing said.") == ("?", "?")


def test_a_row_has_the_facts_of_the_class():
    module = SimpleNamespace(METHOD=FedCBDR, __doc__=DOC)
    wanted = ["graph, image, table, text", "a list", "nothing", "model, replay", "no", "`budget` 20 → 100"]
    assert table_row("x", module) == ["[x](#x)", *wanted]
    assert budget(registry.find("methods", "fedavg").METHOD) == "-"


def test_tests_are_found_by_file_name_or_by_test_name(tmp_path, monkeypatch):
    monkeypatch.setattr(methods.registry, "names", lambda kind: ["one", "two", "three"])
    (tmp_path / "test_one.py").write_text("def test_a_thing():\n    pass\n\n\ndef helper():\n    pass\n")
    (tmp_path / "test_others.py").write_text("def test_two_is_two():\n    pass\n\n\ndef test_x():\n    pass\n")
    for name, file, test in (("one", "test_one.py", "a thing"), ("two", "test_others.py", "two is two")):
        title = f"<summary>Verified by 1 test in <code>tests/methods/{file}</code></summary>"
        assert describe_tests(name, tmp_path) == f"<details>{title}\n{test}.\n</details>"
    assert describe_tests("three", tmp_path) == "**Verified by** the contract tests only."


def test_updating_the_page_keeps_the_experiments(tmp_path, capsys):
    file = tmp_path / "docs" / "methods.md"
    file.parent.mkdir()
    file.write_text(f"old\n{BEGIN}\n\n| a table |\n\n{END}\nold")
    assert main(["list", "methods", "--page", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert f"{BEGIN}\n\n| a table |\n\n{END}" in text and "old\n" not in text.partition(BEGIN)[0]
    assert main(["list", "methods", "--page", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("kind", ["methods", "encoders"])
def test_a_file_that_is_not_the_page_is_not_overwritten(tmp_path, capsys, kind):
    file = tmp_path / "mine.md"
    file.write_text("mine")
    assert main(["list", kind, "--page", str(file)]) != 0
    assert file.read_text() == "mine"
    assert capsys.readouterr().err.count("\n") == 1


def test_an_indented_paragraph_of_a_docstring_is_printed_as_it_is():
    _, paragraphs = split_docstring("Name: what.\n\nFirst.\n\n    step one   does a\n    step two   does b\n\nLast.\n")
    assert paragraphs == [("", "First."), ("", "```\nstep one   does a\nstep two   does b\n```"), ("", "Last.")]


def test_formulas_are_valid() -> None:
    converter = pytest.importorskip("latex2mathml.converter", reason="latex2mathml is not installed")
    formulas = re.findall(r"\$`(.+?)`\$", COMMITTED.read_text(encoding="utf-8"))
    assert len(formulas) > 40
    for formula in formulas:
        assert converter.convert(formula).startswith("<math"), formula
