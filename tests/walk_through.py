"""Runs a page of the documentation: its Python code and its commands, in order, in the present folder."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from profcil.cli.main import main

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
NUMBER = re.compile(r"\d+(\.\d+)?")


def run_page(name: str) -> Iterator[tuple[str, str, str]]:
    """Runs the blocks of a page. Yields each block with an output in the page: its code, what the page prints as its
    output, and the output."""
    page = (DOCS / name).read_text(encoding="utf-8")
    variables: dict[str, object] = {}
    code = ""
    output = ""
    for kind, text in BLOCK.findall(page):
        if kind == "text":
            yield code, text, output
        elif kind in ("", "python"):
            code = text
            output = run_python(text, name, variables) if kind else run_commands(text)


def run_python(text: str, name: str, variables: dict[str, object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, name, "exec"), variables)
    return printed.getvalue()


def run_commands(text: str) -> str:
    """The output of commands of profcil, one a line. A line that ends with a backslash is continued."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "profcil" and main(words[1:]) == 0, line
    return printed.getvalue()


def without_numbers(text: str) -> list[str]:
    """The lines of an output without its numbers, which differ between machines, and without rules and spaces."""
    lines = [re.sub(r"[\s\-─]+", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def numbers(text: str) -> list[float]:
    return [float(found.group()) for found in NUMBER.finditer(text)]


if __name__ == "__main__":  # writes real outputs into a page: walk_through.py PAGE, in an empty folder
    import sys

    path = DOCS / sys.argv[1]
    outputs = iter([found for _, _, found in run_page(sys.argv[1])])

    def fill(block: re.Match[str]) -> str:
        return f"```text\n{next(outputs)}```" if block[1] == "text" else block[0]

    path.write_text(BLOCK.sub(fill, path.read_text(encoding="utf-8")), encoding="utf-8")
