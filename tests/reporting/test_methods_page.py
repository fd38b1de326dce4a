"""The page of methods: what is on it comes from the methods, and the committed page is the generated one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from profcil import registry
from profcil.cli.main import main
from profcil.methods.fedcbdr import FedCBDR
from profcil.reporting import methods
from profcil.reporting.methods import BEGIN, END, budget, experiments_of, page, row, sections, stored, verified

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


def test_the_committed_page_is_the_generated_one():
    """Write it anew with `profcil list methods --page docs/methods.md`."""
    assert COMMITTED.read_text(encoding="utf-8") == page(ROOT / "tests" / "methods", experiments_of(COMMITTED))


def test_every_method_has_a_row_with_all_its_cells_and_a_section():
    text = COMMITTED.read_text(encoding="utf-8")
    for name in registry.names("methods"):
        assert f"\n## {name}\n" in text
        cells = row(name, registry.find("methods", name))
        assert "?" not in cells and all(cells)


def test_a_docstring_is_taken_apart_by_its_marks():
    title, parts = sections(DOC)
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


def test_a_row_says_what_the_class_says():
    made = SimpleNamespace(METHOD=FedCBDR, __doc__=DOC)
    wanted = ["graph, image, text", "a list", "nothing", "model, replay", "no", "`budget` 20 → 100"]
    assert row("x", made) == ["[x](#x)", *wanted]
    assert budget(registry.find("methods", "fedavg").METHOD) == "-"


def test_tests_are_found_by_the_name_of_their_file_or_by_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(methods.registry, "names", lambda room: ["one", "two", "three"])
    (tmp_path / "test_one.py").write_text("def test_a_thing():\n    pass\n\n\ndef helper():\n    pass\n")
    (tmp_path / "test_others.py").write_text("def test_two_is_two():\n    pass\n\n\ndef test_x():\n    pass\n")
    assert verified("one", tmp_path) == "**Verified by** `tests/methods/test_one.py`: a thing."
    assert verified("two", tmp_path) == "**Verified by** `tests/methods/test_others.py`: two is two."
    assert verified("three", tmp_path) == "**Verified by** the contract tests only."


def test_writing_the_page_keeps_the_experiments(tmp_path, capsys):
    file = tmp_path / "docs" / "methods.md"
    file.parent.mkdir()
    file.write_text(f"old\n{BEGIN}\n\n| a table |\n\n{END}\nold")
    assert main(["list", "methods", "--page", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert f"{BEGIN}\n\n| a table |\n\n{END}" in text and "old\n" not in text.partition(BEGIN)[0]
    assert main(["list", "methods", "--page", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("kind", ["methods", "encoders"])
def test_a_page_that_is_none_is_left_alone(tmp_path, capsys, kind):
    file = tmp_path / "mine.md"
    file.write_text("mine")
    assert main(["list", kind, "--page", str(file)]) != 0
    assert file.read_text() == "mine"
    assert capsys.readouterr().err.count("\n") == 1
