"""The README's table of results is that of the results store."""

from __future__ import annotations

from pathlib import Path

from profcil.reporting.results_page import render

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"


def test_the_table_is_that_of_the_store() -> None:
    """`make results-page` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert "<!-- overview: dataset=digits,cora," in text
    assert render(text, ROOT / "results", PAGE) == text


def test_what_the_readme_says_of_pro_lin_holds() -> None:
    """It or its dictionary alone is the best on every benchmark and setting."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- overview:")[2].partition("<!-- end -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| PRO-LIN")]
    assert table.count("**") == sum(line.count("**") for line in lines)
    for column in zip(*(line.split("|")[2:-1] for line in lines), strict=True):
        severe_and_homogeneous = zip(*(cell.split("/") for cell in column if "/" in cell), strict=True)
        assert all(any("**" in value for value in values) for values in severe_and_homogeneous)
