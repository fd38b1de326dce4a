"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with these column titles and rows of cells."""
    rule = ["---"] * len(head)
    return "\n".join(table_line(cells) for cells in [head, rule, *rows])


def table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
