"""Inputs for a trained model, with or without labels, from everything that own data may be read from.

images   image files, folders with images at any depth, arrays (npz), datasets of Hugging Face
texts    texts themselves, a .txt file with one text per line, files with rows; `-` is standard input, one text per line
tables   files with rows, arrays (npz)
a graph  a folder with nodes.csv and edges.csv, or an npz of the graph benchmarks

Files with rows are CSV, TSV, JSON, JSONL, Parquet and datasets of Hugging Face. Their columns are found as they were
when the model was trained: the model file says how (`reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from profcil.config import OWN, OwnSettings
from profcil.errors import ConfigError, DataError, nearest
from profcil.plain_values import build
from profcil.runs.models.saved_model import READING
from profcil.runs.models.trained_model import KINDS, Model

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GivenInputs:
    """Inputs in the form that a model takes."""

    names: list[str]  # one for each example: a path, a text, a row number or a node's id
    inputs: tuple[Tensor, ...]
    labels: list[str]  # class names; empty if the inputs have none

    def __len__(self) -> int:
        return len(self.names)


def read_inputs(
    model: Model, items: Sequence[str], labelled: bool = False, settings: OwnSettings | None = None
) -> GivenInputs:
    """The inputs that a command line names. With `labelled`, each must have a label. `settings` says how files are
    read, by default as the model's own data was."""
    from profcil.runs.models import input_files

    if not items:
        raise ConfigError(f"no inputs were given; name {KINDS.get(model.modality, model.modality)} to predict")
    form = model.expect(model.modality)
    readers: Mapping[str, Callable[..., GivenInputs]] = {
        "image": input_files.read_images,
        "text": input_files.read_texts,
        "table": input_files.read_tables,
        "graph": input_files.read_graph,
    }
    if form.modality not in readers:
        raise DataError(f"inputs of the modality '{form.modality}' cannot be read from files; use profcil.load_model")
    given = readers[form.modality](model, items, labelled, settings or reading_settings(model))
    if not len(given):
        raise DataError(f"{', '.join(items)} has no inputs; give a file or folder with some")
    return given


def reading_settings(model: Model, sets: Iterable[str] = ()) -> OwnSettings:
    """How a model's own data was read, overridden by texts `own.label=NAME` of a command line."""
    from profcil.resolve import own_values

    for text in sets:
        key = text.partition("=")[0].strip()
        if key not in {f"{OWN}.{name}" for name in READING}:
            known = ", ".join(f"{OWN}.{name}" for name in READING)
            raise ConfigError(f"--set {text} has no effect on how inputs are read; allowed are {known}")
    values = {**model.header.get("reading", {}), **own_values({}, sets)}
    return build(OwnSettings, values, OWN)


def class_ids(model: Model, labels: Iterable[str], source: object) -> list[int]:
    """The class ids of labels. A label that the model does not know is an error."""
    ids = {name: i for i, name in enumerate(model.names)}
    found = []
    for label in labels:
        if label not in ids:
            advice = nearest(label, model.names)
            raise DataError(f"{source} has the label '{label}', which is not a class of this model; {advice}")
        found.append(ids[label])
    return found


def choose_nodes(given: GivenInputs, wanted: Sequence[str]) -> GivenInputs:
    """The nodes with these ids, in the same graph."""
    number = {id: i for i, id in enumerate(given.names)}
    missing = [id for id in wanted if id not in number]
    if missing:
        raise DataError(f"the graph has no node '{missing[0]}'; {nearest(missing[0], given.names[:1000])}")
    return chosen_examples(given, [number[id] for id in wanted])


def chosen_examples(given: GivenInputs, rows: Sequence[int]) -> GivenInputs:
    """Some of the nodes to classify, in the same graph."""
    *graph, nodes = given.inputs
    names = [given.names[row] for row in rows]
    labels = [given.labels[row] for row in rows] if given.labels else []
    return replace(given, names=names, inputs=(*graph, nodes[list(rows)]), labels=labels)
