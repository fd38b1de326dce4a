"""The values that the paper reports, and how it names and orders the methods."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

PAPER = Path(__file__).parent / "paper.toml"
PaperValue = tuple[float, float | None]  # a value, and its standard deviation if the paper reports one


@cache
def paper_values() -> dict[str, Any]:
    return tomllib.loads(PAPER.read_text(encoding="utf-8"))


def paper_value(*path: str) -> PaperValue | None:
    """One value by its keys, e.g. ("results", "cora", "severe", "pro", "faa"); None if the paper does not report it."""
    found: Any = paper_values()
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    if found is None or isinstance(found, dict):
        return None
    return (found[0], found[1]) if isinstance(found, list) else (found, None)


def method_title(method: str) -> str:
    """The name of a method as the paper writes it."""
    return paper_values()["titles"].get(method, method)


def stream_title(stream: str) -> str:
    """A stream (`cora, severe`) with the dataset as people write it."""
    dataset, comma, rest = stream.partition(",")
    return paper_values()["datasets"].get(dataset, dataset) + comma + rest


def method_rank(method: str) -> tuple[int, str]:
    """A sort key: the order of the paper's tables, then other methods by name."""
    order = list(paper_values()["titles"])
    return (order.index(method) if method in order else len(order), method)


def is_baseline(method: str) -> bool:
    return method not in paper_values()["ours"]
