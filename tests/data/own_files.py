"""Writes small own data in every form: four classes that are easy to tell apart."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from profcil.randomness import generator

CLASSES = ("ant", "bee", "cat", "dog")
WORDS = {"ant": "six legs soil", "bee": "honey wings", "cat": "meow whiskers", "dog": "bark tail"}


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def text_rows(each: int = 10, classes: Sequence[str] = CLASSES) -> list[tuple[str, str]]:
    return [(f"number {i}: {WORDS[name]}, today", name) for i in range(each) for name in classes]


def write_texts(path: Path, each: int = 10) -> Path:
    """Texts as CSV, TSV, JSON or JSONL, by the suffix."""
    rows = text_rows(each)
    if path.suffix in (".csv", ".tsv"):
        return write_csv(path, ("text", "label"), rows, "\t" if path.suffix == ".tsv" else ",")
    objects = [{"text": text, "label": label} for text, label in rows]
    lines = "\n".join(map(json.dumps, objects))
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(objects), encoding="utf-8")
    return path


def table_rows(each: int = 12) -> list[list[Any]]:
    """Four columns of different scales; each class is large in one of them."""
    rows: list[list[Any]] = []
    for label, name in enumerate(CLASSES):
        values = generator(0, "rows", name).normal(size=(each, 4)) + 5 * (np.arange(4) == label)
        rows += [[*row, name] for row in (values * [1, 10, 100, 0.1] + 3).round(4).tolist()]
    return rows


def write_table(path: Path, each: int = 12) -> Path:
    return write_csv(path, ("a", "b", "c", "d", "label"), table_rows(each))


def write_images(path: Path, each: int = 8, size: int = 12, classes: Sequence[str] = CLASSES) -> Path:
    """Grey images; each class is bright in one quarter."""
    from PIL import Image

    half = size // 2
    for label, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        row, column = divmod(label % 4, 2)
        for i in range(each):
            x = generator(0, "image", name, i).integers(0, 60, (size, size)).astype(np.uint8)
            x[half * row : half * (row + 1), half * column : half * (column + 1)] += 180
            Image.fromarray(x).save(path / name / f"{i}.png")
    return path


def write_graph(path: Path, each: int = 8, split: bool = False) -> Path:
    """Each class has a feature of its own, beside random ones, and its nodes form a chain."""
    nodes = [(f"{name}-{i}", name, i) for name in CLASSES for i in range(each)]
    header = ["id", "label", *"wxyz", *(["split"] if split else [])]
    rows = []
    for node, name, i in nodes:
        part = ["test" if i < 2 else "train"] if split else []
        noise = generator(0, "node", node).random(len(CLASSES)).round(3)
        rows.append(
            [node, name, *(int(name == other) + 0.5 * x for other, x in zip(CLASSES, noise, strict=True)), *part]
        )
    write_csv(path / "nodes.csv", header, rows)
    ends = [(a[0], b[0]) for a, b in pairwise(nodes) if a[1] == b[1]]
    write_csv(path / "edges.csv", ("source", "target"), ends)
    return path
