"""Generates docs/methods.md from the methods: their classes, docstrings and tests.

A method's docstring begins with one line, "NAME (paper): what it is". Its paragraphs begin with a word of `MARKS` and
a colon. "Stored: on the server ...; on a client ..." says what is stored between rounds in addition to the model. A
paragraph without such a word continues the previous one. An indented paragraph is printed as it is. The section
between the two experiment markers is written by hand and is kept.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.errors import DataError, count
from profcil.io.atomic_files import write_text
from profcil.reporting.markdown import markdown_table

MARKS = ("Choose it", "Loss", "Kept", "Stored", "Adapted", "Departed from", "Left out", "Uncertain")
BEGIN = "<!-- experiments: written by hand -->"
END = "<!-- end of experiments -->"
HEAD = """# Methods

Written by `profcil list methods --page docs/methods.md` from the methods' own classes, docstrings and tests; the part
on experiments is written by hand. All methods run under one protocol: the same stream, shared warm-up, participation,
optimiser and seeds, one global head, labels as sets of class ids. The channel counts what a method sends, by the kinds
in the table. A budget is per old class, client and local epoch; `regime = "expanded"` sets the second value. Every
method passes `tests/contracts/test_methods.py`: resuming gives the same bits, results do not depend on the order of
execution or on global randomness, every byte is in the ledger, and idle clients, clients with one example, returning
classes and a single client work.

A loss is that of one step of a client, a mean over a batch $`(x, y)`$ with the model $`f_w`$, its base features $`u`$,
its features $`z`$ after the adapter and its head $`h_w`$. In the cross-entropy $`\\mathrm{CE}_Y`$ the classes $`Y`$
compete: the classes $`S`$ seen so far, or the client's current classes $`C`$ (`label_space`). Here
$`\\mathrm{H}_O(a, b)`$ is the cross-entropy between the soft-max of logits $`a`$ and that of $`b`$ over
other classes $`O`$, and $`\\varepsilon`$ is standard normal.
"""
COLUMNS = ("method", "data", "stored on the server", "stored on a client", "sent", "server gradients", "budget")


def render_page(tests: Path, experiments: str) -> str:
    """The whole page; `tests` is the folder with the test files of the methods."""
    methods = registry.usable("methods")
    rows = [table_row(name, module) for name, module in methods.items()]
    table = markdown_table(COLUMNS, rows)
    sections = [method_section(name, module, tests) for name, module in methods.items()]
    by_hand = f"{BEGIN}\n\n{experiments.strip()}\n\n{END}"
    return "\n\n".join([HEAD.rstrip(), "## At a glance", table, *sections, by_hand]) + "\n"


def update(path: Path) -> None:
    """Rewrites the page and keeps its experiments. The tests are expected in tests/methods beside the page's folder."""
    tests = path.resolve().parent.parent / "tests" / "methods"
    write_text(path, render_page(tests, read_experiments(path)))


def read_experiments(path: Path) -> str:
    """The text between the experiment markers of an existing page; empty if there is no page."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise DataError(f"{path} has no part between '{BEGIN}' and '{END}'; give another file, or add the markers")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def table_row(name: str, module: Any) -> list[str]:
    """The row of a method in the table."""
    method = module.METHOD
    server, client = stored(module.__doc__ or "")
    modalities = ", ".join(sorted(method.modalities))
    kinds = ", ".join(sorted(method.kinds))
    gradients = "yes" if method.server_gradients else "no"
    return [f"[{name}](#{name})", modalities, server, client, kinds, gradients, budget(method)]


def method_section(name: str, module: Any, tests: Path) -> str:
    """The section of a method: its docstring and its tests."""
    title, paragraphs = split_docstring(module.__doc__ or "")
    texts = [f"**{mark}:** {text}" if mark else text for mark, text in paragraphs]
    return "\n\n".join([f"## {name}", title, *texts, describe_tests(name, tests)])


def split_docstring(doc: str) -> tuple[str, list[tuple[str, str]]]:
    """The first line of a docstring, and its paragraphs with the mark that each begins with (or empty)."""
    title, _, rest = doc.strip().partition("\n")
    marks = "|".join(MARKS)
    paragraphs = []
    for raw in re.split(rf"\n\n|\n(?=(?:{marks})\b[^:.\n]*:)", rest.strip()):
        if raw.startswith("    "):
            paragraphs.append(("", f"```\n{textwrap.dedent(raw)}\n```"))
            continue
        text = " ".join(raw.split())
        mark = re.match(rf"({marks})( [^:.]+)?: ?", text)
        if mark:
            paragraphs.append((mark[0].rstrip(": "), text[mark.end() :]))
        else:
            paragraphs.append(("", text))
    return title, [(mark, text) for mark, text in paragraphs if text]


def stored(doc: str) -> tuple[str, str]:
    """What the docstring says is stored on the server and on a client in addition to the model."""
    _, paragraphs = split_docstring(doc)
    paragraph = dict(paragraphs).get("Stored", "")
    places = re.fullmatch(r"on the server (.+?); on a client (.+?)\.", paragraph)
    return (places[1], places[2]) if places else ("?", "?")


def budget(method: Any) -> str:
    """The settings that a regime changes: matched → expanded."""
    defaults = {field.name: field.default for field in dataclasses.fields(method.Params)}
    expanded: Mapping[str, Any] = method.regimes.get("expanded", {})
    changes = []
    for key, value in expanded.items():
        changes.append(f"`{key}` {defaults[key]} → {value}")
    return ", ".join(changes) or "-"


def describe_tests(name: str, tests: Path) -> str:
    """The tests of a method: all tests in the file of its name, or tests with its name in files of no method."""
    own_file = tests / f"test_{name}.py"
    if own_file.exists():
        tests_by_file = {own_file.name: list_tests(own_file)}
    else:
        method_files = {f"test_{other}.py" for other in registry.names("methods")}
        shared = sorted(file for file in tests.glob("test_*.py") if file.name not in method_files)
        tests_by_file = {}
        for file in shared:
            names = list_tests(file)
            tests_by_file[file.name] = [test for test in names if name in test.split("_")]
    lines = []
    for file_name, names in tests_by_file.items():
        if names:
            readable = "; ".join(html.escape(readable_name(test)) for test in names)
            title = f"Verified by {count(len(names), 'test')} in <code>tests/methods/{file_name}</code>"
            lines.append(f"<details><summary>{title}</summary>\n{readable}.\n</details>")
    return "\n\n".join(lines) or "**Verified by** the contract tests only."


def readable_name(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def list_tests(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]
