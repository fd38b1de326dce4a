"""The walk-throughs of the documentation run as printed, and print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest
from walk_through import DOCS, numbers, run_page, without_numbers

PAGES = sorted(path.name for path in DOCS.glob("walk-through-*.md"))
NEEDS = {"images": ("PIL", "onnxscript"), "graph": ("torch_geometric",), "two-hospitals": ("flwr",)}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def test_there_are_five():
    assert [page.removeprefix("walk-through-").removesuffix(".md") for page in PAGES] == [
        "graph",
        "images",
        "table",
        "texts",
        "two-hospitals",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_walk_through_runs_and_prints_what_it_shows(page):
    """Numbers may differ in their last digits between machines; accuracies may not differ by more than ten points."""
    for module in NEEDS.get(page.removeprefix("walk-through-").removesuffix(".md"), ()):
        pytest.importorskip(module)
    shown_outputs = 0
    for code, shown, printed in run_page(page):
        shown_outputs += 1
        assert without_numbers(printed) == without_numbers(shown), code
        if shown.startswith("FAA"):
            faa = 0
            assert numbers(printed)[faa] == pytest.approx(numbers(shown)[faa], abs=10)
            assert numbers(printed)[faa] > 85
    assert shown_outputs >= 2


def test_the_test_fails_where_a_page_shows_something_else():
    assert without_numbers("barolo 0.9") != without_numbers("barbera 0.9")
    assert without_numbers("FAA    CTA\n97.2   3.1") == without_numbers("FAA  CTA\n100.00  5")
