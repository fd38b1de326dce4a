"""The paper's own figures, and how it names and orders the methods."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

PAPER = Path(__file__).parent / "paper.toml"
Figure = tuple[float, float | None]  # a value, and its standard deviation where the paper gives one


@cache
def figures() -> dict[str, Any]:
    return tomllib.loads(PAPER.read_text(encoding="utf-8"))


def figure(*path: str) -> Figure | None:
    """One figure by its place, e.g. ("results", "cora", "severe", "pro", "faa"); None where the paper has none."""
    found: Any = figures()
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    if found is None or isinstance(found, dict):
        return None
    return (found[0], found[1]) if isinstance(found, list) else (found, None)


def title(method: str) -> str:
    """A method as the paper writes it."""
    return figures()["titles"].get(method, method)


def rank(method: str) -> tuple[int, str]:
    """Where a method stands in the paper's tables."""
    order = list(figures()["titles"])
    return (order.index(method) if method in order else len(order), method)


def is_baseline(method: str) -> bool:
    return method not in figures()["ours"]
