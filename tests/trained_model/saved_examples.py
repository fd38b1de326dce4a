"""Saved models, and writers of the examples they were tested on."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from profcil.data._examples import bytes_of


@dataclass(frozen=True)
class Saved:
    """A folder with a model file, and the finished run that it is of."""

    folder: Path
    run: Any

    @property
    def test(self) -> Any:
        return self.run.world.bundle.test


def write_csv(path: Path, rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def write_test_images(saved: Saved, folder: Path) -> Path:
    """The test images as PNG files in one folder per class."""
    image = pytest.importorskip("PIL.Image")
    for row, (x, y) in enumerate(zip(saved.test.x, saved.test.y.tolist(), strict=True)):
        own = folder / saved.run.world.bundle.names[y]
        own.mkdir(parents=True, exist_ok=True)
        image.fromarray(bytes_of(x).numpy()).save(own / f"{row:03}.png")
    return folder


def text_of(tokens: torch.Tensor) -> str:
    return " ".join(f"w{token}" if token > 1 else "unknown" for token in tokens.tolist() if token)


def write_test_texts(saved: Saved, path: Path) -> Path:
    names = saved.run.world.bundle.names
    rows = [[text_of(x), names[y]] for x, y in zip(saved.test.x, saved.test.y.tolist(), strict=True)]
    write_csv(path, [["text", "label"], *rows])
    return path


def write_test_graph(saved: Saved, folder: Path) -> Path:
    """The whole graph, with the labels of its test nodes; other nodes have the label of class 0."""
    folder.mkdir(parents=True, exist_ok=True)
    x = saved.test.x
    labels = dict(zip(saved.test.nodes.tolist(), saved.test.y.tolist(), strict=True))
    rows = [[f"n{i}", labels.get(i, 0), *map(repr, row)] for i, row in enumerate(x.tolist())]
    write_csv(folder / "nodes.csv", [["id", "label", *(f"f{i}" for i in range(x.shape[1]))], *rows])
    edges = [[f"n{a}", f"n{b}"] for a, b in saved.test.edges.T.tolist()]
    write_csv(folder / "edges.csv", [["source", "target"], *edges])
    return folder


WRITERS: dict[str, Callable[[Saved, Path], Path]] = {
    "image": write_test_images,
    "text": write_test_texts,
    "graph": write_test_graph,
}
FILES = {"image": "images", "text": "texts.csv", "graph": "graph"}
