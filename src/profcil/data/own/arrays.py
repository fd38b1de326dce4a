"""Data that was given from Python: arrays, texts and Bundles, as files that a run can be resumed from."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profcil.data._numbers import number_columns
from profcil.data.bundle import Bundle, Examples, Facts, File, Nodes, Rows
from profcil.data.input_format import input_format_of_json
from profcil.data.own.raw import PARTS, Raw
from profcil.errors import DataError
from profcil.io.npy import npz_names, read_npz

HEADER = "profcil_bundle"  # the member of an npz that describes a Bundle
MOST_CHANNELS = 4  # of an image; what is more, is a side
KINDS = {"Rows": Rows, "Nodes": Nodes}


# -- arrays x and y ---------------------------------------------------------------------------------------------------


def save_arrays(path: Path, given: Mapping[str, Any]) -> None:
    """Writes arrays x and y, and those of other parts (test_x, test_y, val_x, val_y), to an npz file."""
    known = {"names", "x", "y"}
    for part in PARTS:
        known |= {f"{part}_x", f"{part}_y"}
    for key in given:
        if key not in known:
            raise DataError(f"data has the key '{key}'; allowed are x and y, test_x and test_y, val_x and val_y, names")
    arrays = {key: np.asarray(value) for key, value in given.items()}
    for key, array in arrays.items():
        if array.dtype == object:
            raise DataError(f"'{key}' is a list of unequal parts; give an array of numbers or a list of texts")
    np.savez(path, **arrays)  # type: ignore[arg-type]


def save_texts(path: Path, given: Mapping[str, Any]) -> None:
    """Writes texts and labels of all parts to a JSONL file."""
    names = tuple(map(str, given.get("names", ())))
    with path.open("w", encoding="utf-8") as file:
        for part, x, y in array_parts(given):
            for text, label in zip(x, np.asarray(y).tolist(), strict=True):
                row = {"text": str(text), "label": label_name(label, names, "data")}
                if part:
                    row["split"] = part
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def array_parts(given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The parts among arrays, with their names; x and y alone have the name "" and are divided later."""
    others = [prefix for prefix in PARTS if f"{prefix}_x" in given]
    if "x" in given:
        yield ("train" if others else ""), *checked_pair(given, "x", "y")
    for prefix in others:
        yield PARTS[prefix], *checked_pair(given, f"{prefix}_x", f"{prefix}_y")


def checked_pair(given: Mapping[str, Any], x: str, y: str) -> tuple[Any, Any]:
    if y not in given:
        raise DataError(f"data has {x} without {y}; give both")
    examples = len(given[x])
    labels = len(given[y])
    if examples != labels:
        raise DataError(f"{x} has {examples} examples and {y} has {labels} labels; give one of each")
    return given[x], given[y]


def read_arrays(path: Path) -> Raw:
    """Images or rows of a table from arrays x and y, and from those of other parts."""
    try:
        given = read_npz(path)
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); write arrays of numbers or texts to it") from None
    parts = list(array_parts(given))
    if not parts:
        raise DataError(f"{path} has the arrays {', '.join(given) or 'none'}; it needs x and y, or adj_* and attr_*")
    inputs = [as_inputs(x, path) for _, x, _ in parts]
    if len({x.shape[1:] for x in inputs}) > 1:
        raise DataError(f"{path} has parts whose inputs have different shapes; give all parts the same shape")
    x = np.concatenate(inputs)
    names = tuple(str(name) for name in given.get("names", ()))
    labels: list[str] = []
    drawn: list[str] = []
    for part, _, y in parts:
        labels += [label_name(label, names, path) for label in y.tolist()]
        if part:
            drawn += [part] * len(y)
    if x.ndim == 4:
        return Raw("image", x, labels, drawn, shape=tuple(x.shape[1:]), names=names)
    columns = tuple(f"column {i + 1}" for i in range(x.shape[1]))
    by_column = dict(zip(columns, x.T, strict=True))
    x = number_columns(by_column, columns, path)
    return Raw("table", x, labels, drawn, columns=columns, names=names)


def label_name(label: Any, names: Sequence[str], path: object) -> str:
    """The name of a class; with `names`, labels are their indices."""
    if not names:
        return str(label)
    if not isinstance(label, int) or not 0 <= label < len(names):
        raise DataError(f"{path} has the label {label!r} where names has {len(names)} entries; give labels from 0 on")
    return names[label]


def as_inputs(x: np.ndarray, path: Path) -> np.ndarray:
    """Images as [n, channels, height, width], a table as [n, columns]."""
    if x.ndim == 2 and x.dtype.kind in "fiub":
        return x
    if x.ndim == 3:
        x = x[:, None]
    channels_last = x.ndim == 4 and x.shape[1] > MOST_CHANNELS >= x.shape[3]
    if channels_last:
        x = x.transpose(0, 3, 1, 2)
    has_pixel_type = x.dtype.kind == "f" or x.dtype == np.uint8
    if x.ndim != 4 or not has_pixel_type:
        raise DataError(
            f"{path} has inputs {list(x.shape)} of type {x.dtype}; allowed are images, uint8 or floats from 0 to 1, "
            "[n, channels, height, width], and tables of numbers, [n, columns]"
        )
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
    return np.ascontiguousarray(x)


# -- Bundles ----------------------------------------------------------------------------------------------------------


def save_bundle(path: Path, bundle: Bundle) -> None:
    """Writes a Bundle to an npz file. A tensor that several parts share is written once."""
    arrays: dict[str, np.ndarray] = {}
    written: dict[int, str] = {}
    parts: dict[str, Any] = {}
    for part in ("train", "test", "validation"):
        examples: Examples | None = getattr(bundle, part)
        if examples is None:
            continue
        places = {}
        for name, tensor in vars(examples).items():
            key = written.setdefault(tensor.data_ptr(), f"array{len(arrays)}")
            arrays[key] = tensor.cpu().numpy()
            places[name] = key
        parts[part] = {"kind": type(examples).__name__, "arrays": places}
    form = bundle.input_format.to_json() if bundle.input_format else None
    values = {
        "parts": parts,
        "facts": asdict(bundle.facts),
        "names": bundle.names,
        "vocabulary": bundle.vocabulary,
        "mean": bundle.mean,
        "std": bundle.std,
        "input_format": form,
    }
    header = np.array(json.dumps(values))
    np.savez(path, **{HEADER: header}, **arrays)  # type: ignore[arg-type]


def is_saved_bundle(path: Path) -> bool:
    """Whether a file is one that `save_bundle` wrote."""
    return path.suffix.lower() == ".npz" and zipfile.is_zipfile(path) and HEADER in array_names(path)


def array_names(path: Path) -> set[str]:
    """The names of the arrays in an npz file. A file that is none raises a DataError."""
    try:
        return npz_names(path)
    except ValueError as error:
        raise DataError(f"{path} cannot be read as npz ({error}); write it with numpy.savez") from None


def load_saved_bundle(path: Path) -> Bundle:
    """The Bundle of a file that `save_bundle` wrote."""
    try:
        arrays = read_npz(path)
        values = json.loads(str(arrays.pop(HEADER)))
        return bundle_of_json(values, {name: torch.from_numpy(array) for name, array in arrays.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); give the data again") from None


def bundle_of_json(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Bundle:
    """A Bundle from its tensors and what a file says about them."""
    parts: dict[str, Examples] = {}
    for part, given in values["parts"].items():
        own = {name: tensors[key] for name, key in given["arrays"].items()}
        kind = KINDS[given["kind"]]
        parts[part] = kind(**own)
    form = input_format_of_json(values["input_format"]) if values["input_format"] else None
    return Bundle(
        facts_of_json(values["facts"]),
        parts["train"],
        parts["test"],
        parts.get("validation"),
        tuple(values["names"]),
        values["vocabulary"],
        tuple(values["mean"]),
        tuple(values["std"]),
        input_format=form,
    )


def facts_of_json(values: Mapping[str, Any]) -> Facts:
    known = {field.name for field in fields(Facts)}
    given = {name: value for name, value in values.items() if name in known}
    files = tuple(File(**file) for file in given["files"])
    return Facts(**(given | {"files": files, "views": tuple(given["views"])}))
