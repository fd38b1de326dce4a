"""Compares the functions of two commits, wherever they stand: proof that a change only moves or renames.

    python tests/golden/moved_functions.py BASE [--names OLD=NEW ...]

Every function of src/profcil is dumped as a syntax tree without docstrings and imports, and with the names of --names
replaced. Printed are the functions that only one side has.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = "src/profcil"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def texts_of(commit: str) -> Iterator[str]:
    """The modules of a commit."""
    listed = git("ls-tree", "-r", "--name-only", commit, SOURCE)
    for path in listed.splitlines():
        if path.endswith(".py"):
            yield git("show", f"{commit}:{path}")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


class Bare(ast.NodeTransformer):
    """Drops docstrings and imports, and replaces names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
        for field, value in ast.iter_fields(node):
            if isinstance(value, str):  # names of functions, variables, attributes and arguments, and texts
                setattr(node, field, self.names.get(value, value))
        return super().generic_visit(node)


def dumps(text: str, names: Mapping[str, str]) -> Iterator[str]:
    """Every function of a module, also methods and inner ones."""
    for node in ast.walk(Bare(names).visit(ast.parse(text))):
        if isinstance(node, FUNCTIONS):
            yield ast.dump(node)


def main() -> int:
    parser = argparse.ArgumentParser(description="the functions that only one of two commits has")
    parser.add_argument("base")
    parser.add_argument("--names", nargs="*", default=[], help="OLD=NEW")
    args = parser.parse_args()
    names = dict(pair.split("=", 1) for pair in args.names)
    old = Counter(d for text in texts_of(args.base) for d in dumps(text, names))
    now = [path.read_text(encoding="utf-8") for path in sorted((ROOT / SOURCE).rglob("*.py"))]
    new = Counter(d for text in now for d in dumps(text, {}))
    for sign, only in (("-", old - new), ("+", new - old)):
        for dump in only.elements():
            print(sign, dump[:200])
    print(f"{old.total()} functions at {args.base}, {new.total()} now, {(old & new).total()} equal")
    return int(old != new)


if __name__ == "__main__":
    raise SystemExit(main())
