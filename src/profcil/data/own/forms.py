"""Finds the form of a file or folder, and reads it."""

from __future__ import annotations

import csv
from pathlib import Path

from profcil.config import OwnSettings
from profcil.data.own import records
from profcil.data.own.arrays import array_names, read_arrays
from profcil.data.own.graphs import read_graph_folder, read_graph_npz
from profcil.data.own.images import has_images, part_folders, read_images
from profcil.data.own.raw import PARTS, Raw
from profcil.data.own.rows import read_rows
from profcil.errors import DataError

FORMS = "class folders of images, nodes.csv and edges.csv, train.csv, or a dataset of Hugging Face"


def read_raw(path: Path, settings: OwnSettings) -> Raw:
    """Labelled inputs from a file or folder, whatever their form."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder with --data")
    try:
        raw = read_folder(path, settings) if path.is_dir() else read_file(path, settings)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not in the encoding {settings.encoding} ({error.reason} at byte "
            f"{error.start}); convert it to UTF-8, or name its encoding with --set own.encoding=latin-1"
        ) from None
    except LookupError as error:
        if "encoding" not in str(error):
            raise
        raise DataError(f"own.encoding is '{settings.encoding}', which is not known; use utf-8 or latin-1") from None
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table ({error}); save it as plain CSV") from None
    wanted = settings.modality
    if wanted and wanted != raw.modality:
        raise DataError(f"{path} is read as {raw.modality}, but own.modality is {wanted}; leave own.modality out")
    return raw


def read_file(path: Path, settings: OwnSettings) -> Raw:
    if path.suffix in records.SUFFIXES:
        return read_rows([("", records.read_records(path, settings.encoding))], settings)
    if path.suffix == ".npz":
        return read_npz(path)
    known = ", ".join((*records.SUFFIXES, ".npz"))
    raise DataError(f"{path} has none of the suffixes {known}; save it in one of these forms")


def read_npz(path: Path) -> Raw:
    """A graph of the benchmarks, or arrays x and y."""
    return read_graph_npz(path) if "adj_indptr" in array_names(path) else read_arrays(path)


def read_folder(path: Path, settings: OwnSettings) -> Raw:
    if (path / "nodes.csv").exists() and (path / "edges.csv").exists():
        return read_graph_folder(path, settings)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return read_rows(records.read_hugging_face(path), settings)
    if files := part_files(path):
        parts = [(part, records.read_records(file, settings.encoding)) for part, file in files.items()]
        return read_rows(parts, settings)
    if part_folders(path) or has_images(path):
        return read_images(path, settings)
    raise DataError(
        f"{path} is not data that can be read: it has none of {FORMS}; if it is the folder of the known datasets, give "
        "--dataset NAME, too"
    )


def part_files(path: Path) -> dict[str, Path]:
    """The files train.csv, val.csv and test.csv of a folder, or the same with other suffixes, by the name of the
    part; empty if there is no training part."""
    found = {}
    for file in sorted(path.iterdir()):
        if file.stem in PARTS and file.suffix in records.SUFFIXES:
            found[file.stem] = file
    ordered = {name: found[name] for name in PARTS if name in found}
    return ordered if "train" in map(PARTS.get, ordered) else {}
