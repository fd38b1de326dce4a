"""What the readers return: inputs as they are in the files, with the name of the class of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profcil.data.bundle import Bundle

PARTS = {  # names of parts in files and folders -> the part
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}


@dataclass(frozen=True)
class Raw:
    """Labelled inputs in the order of the files."""

    modality: str
    # texts: a list; a table: float64 [n, columns], or columns by name if some are categories; images: files, or their
    # content; arrays of images: uint8
    inputs: Any
    labels: list[str]  # the class of every example
    parts: list[str]  # the part of every example; empty = to be drawn
    columns: tuple[str, ...] = ()  # names of the features of a table or graph
    shape: tuple[int, ...] = ()  # images: channels, height and width
    edges: np.ndarray | None = None  # graphs
    nodes: np.ndarray | None = None  # graphs: the node of every example; `inputs` are the features of all nodes
    names: tuple[str, ...] = ()  # class names in the order of the ids that the files have; empty = sorted
    notes: tuple[str, ...] = ()  # sentences for the user


@dataclass(frozen=True)
class DataSummary:
    """What the defaults of a run depend on."""

    path: Path
    modality: str
    names: tuple[str, ...]
    train: int
    shape: tuple[int, ...] = ()  # of one input
    notes: tuple[str, ...] = ()

    @staticmethod
    def of_bundle(path: Path, bundle: Bundle) -> DataSummary:
        shape = tuple(bundle.train.x.shape[1:])
        return DataSummary(path, bundle.facts.modality, bundle.names, len(bundle.train), shape)
