"""The page of methods, written from the methods themselves: classes, docstrings, and the tests that bear their names.

A method's docstring begins with one line, "NAME (paper): what it is", and has paragraphs that begin with a word of
`MARKS` and a colon. "Stored: on the server ...; on a client ..." says what is kept between rounds beyond the model.
Paragraphs without a mark belong to what stands before. What was measured stands in a part of the page between two
marks of its own; that part is written by people and left alone here.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.errors import DataError
from profcil.io.atomic_files import write_text

MARKS = ("Kept", "Stored", "Adapted", "Departed from", "Left out", "Uncertain")
BEGIN, END = "<!-- experiments: written by hand -->", "<!-- end of experiments -->"
HEAD = """# Methods

Written by `profcil list methods --page docs/methods.md` from the methods' own classes, docstrings and tests; the part
on experiments is kept as it is. All methods run under one protocol: the same stream, shared warm-up, participation,
optimiser and seeds, one global head, labels as sets of class ids. What a method sends is metered at the door, by the
kinds in the table. A budget is per old class, client and local epoch; `regime = "expanded"` sets the second value.
Every method passes `tests/contracts/test_methods.py`: resumed to the same bits, independent of the order of
execution and of global randomness, every byte in the ledger, idle clients, clients with one example, classes that
return, a single client.
"""
COLUMNS = ("method", "data", "stored on the server", "stored on a client", "sent", "server gradients", "budget")


def page(tests: Path, experiments: str) -> str:
    """The whole page; `tests` is the folder with a test file for each method."""
    found = registry.usable("methods")
    table = [COLUMNS, ["---"] * len(COLUMNS), *(row(name, module) for name, module in found.items())]
    lines = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    parts = [section(name, module, tests) for name, module in found.items()]
    kept = f"{BEGIN}\n\n{experiments.strip()}\n\n{END}"
    return "\n\n".join([HEAD.rstrip(), "## At a glance", lines, kept, *parts]) + "\n"


def update(path: Path) -> None:
    """Writes the page anew; its experiments stay. The tests are looked for beside the page's folder."""
    write_text(path, page(tests_beside(path), experiments_of(path)))


def tests_beside(path: Path) -> Path:
    return path.resolve().parent.parent / "tests" / "methods"


def experiments_of(path: Path) -> str:
    """What stands between the marks of an existing page."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise DataError(f"{path} has no part between '{BEGIN}' and '{END}'; give another file, or put the marks in")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def row(name: str, module: Any) -> list[str]:
    """A method's line of the table."""
    method, (server, client) = module.METHOD, stored(module.__doc__ or "")
    data, sent = (", ".join(sorted(words)) for words in (method.modalities, method.kinds))
    gradients = "yes" if method.server_gradients else "no"
    return [f"[{name}](#{name})", data, server, client, sent, gradients, budget(method)]


def section(name: str, module: Any, tests: Path) -> str:
    """Everything that a method says of itself, and which tests stand behind it."""
    title, parts = sections(module.__doc__ or "")
    texts = [f"**{mark}:** {text}" if mark else text for mark, text in parts]
    return "\n\n".join([f"## {name}", title, *texts, verified(name, tests)])


def sections(doc: str) -> tuple[str, list[tuple[str, str]]]:
    """A docstring's first line, and its paragraphs with the mark each begins with; empty where it has none."""
    title, _, rest = doc.strip().partition("\n")
    mark, parts = re.compile(rf"({'|'.join(MARKS)})( [^:.]+)?: ?"), []
    for text in re.split(rf"\n\n|\n(?=(?:{'|'.join(MARKS)})\b[^:.\n]*:)", rest.strip()):
        text = " ".join(text.split())
        found = mark.match(text)
        parts.append((found[0].rstrip(": "), text[found.end() :]) if found else ("", text))
    return title, [part for part in parts if part[1]]


def stored(doc: str) -> tuple[str, str]:
    """What the docstring says is kept on the server and on a client beyond the model."""
    said = dict(sections(doc)[1]).get("Stored", "")
    found = re.fullmatch(r"on the server (.+?); on a client (.+?)\.", said)
    return (found[1], found[2]) if found else ("?", "?")


def budget(method: Any) -> str:
    """The settings that a regime changes: matched → expanded."""
    defaults = {f.name: f.default for f in dataclasses.fields(method.Params)}
    expanded: Mapping[str, Any] = method.regimes.get("expanded", {})
    return ", ".join(f"`{key}` {defaults[key]} → {value}" for key, value in expanded.items()) or "-"


def verified(name: str, tests: Path) -> str:
    """The tests of a method: those in the file of its name; else, in files that are no other's, those that name it."""
    own, taken = tests / f"test_{name}.py", {f"test_{other}.py" for other in registry.names("methods")}
    files = [own] if own.exists() else sorted(f for f in tests.glob("test_*.py") if f.name not in taken)
    named = {f.name: [t for t in tests_in(f) if f == own or name in t.split("_")] for f in files}
    lines = [f"**Verified by** `tests/methods/{file}`: {spoken(found)}." for file, found in named.items() if found]
    return "\n\n".join(lines) or "**Verified by** the contract tests only."


def spoken(names: list[str]) -> str:
    return "; ".join(name.removeprefix("test_").replace("_", " ") for name in names)


def tests_in(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
