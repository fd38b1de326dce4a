"""Reads the notebooks of docs/tutorials: their cells, and the page that the site shows of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

COMMAND = "!"  # a cell that begins with it is a command of the shell


@dataclass(frozen=True)
class Cell:
    is_code: bool
    text: str

    @property
    def is_command(self) -> bool:
        return self.is_code and self.text.startswith(COMMAND)


def read_cells(path: Path) -> list[Cell]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [Cell(cell["cell_type"] == "code", "".join(cell["source"])) for cell in notebook["cells"]]


def to_markdown(path: Path) -> str:
    """The notebook as a page of Markdown, with a link to the notebook itself after the title."""
    title, *others = [markdown_of(cell) for cell in read_cells(path)]
    heading, _, text = title.partition("\n")
    link = f"[Download this page as a notebook.]({path.name})"
    return "\n\n".join([heading, link, text.strip(), *others]) + "\n"


def markdown_of(cell: Cell) -> str:
    if cell.is_command:
        return f"```\n{cell.text.removeprefix(COMMAND)}\n```"
    return f"```python\n{cell.text}\n```" if cell.is_code else cell.text
