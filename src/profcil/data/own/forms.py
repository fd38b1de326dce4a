"""Finds the form of a file or folder, and reads it."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profcil.config import OwnSettings
from profcil.data.own import records
from profcil.data.own.arrays import array_names, read_arrays
from profcil.data.own.graphs import read_graph_folder, read_graph_npz
from profcil.data.own.images import has_images, loose_images, part_folders, read_images
from profcil.data.own.raw import PARTS, Raw
from profcil.data.own.rows import read_rows
from profcil.errors import DataError

FORMS = "class folders of images, nodes.csv and edges.csv, train.csv, or a dataset of Hugging Face"


def read_raw(path: Path, settings: OwnSettings) -> Raw:
    """Labelled inputs from a file or folder, whatever their form."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or folder with --data")
    with explained(path, settings.encoding):
        raw = read_folder(path, settings) if path.is_dir() else read_file(path, settings)
    wanted = settings.modality
    if wanted and wanted != raw.modality:
        raise DataError(f"{path} is read as {raw.modality}, but own.modality is {wanted}; leave own.modality out")
    return raw


@contextmanager
def explained(path: Path, encoding: str) -> Iterator[None]:
    """Turns an error about the encoding of a file, or about the form of a CSV, into one sentence."""
    try:
        yield
    except UnicodeError as error:
        raise wrong_encoding(path, encoding, error) from None
    except LookupError as error:
        if "encoding" not in str(error):
            raise
        raise DataError(f"own.encoding is '{encoding}', which is not known; use utf-8 or latin-1") from None
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table ({error}); save it as plain CSV") from None


def wrong_encoding(path: Path, encoding: str, error: UnicodeError) -> DataError:
    """The error for a text file in another encoding, with one that may fit."""
    is_utf16 = path.is_file() and path.read_bytes()[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    place = f"{error.reason} at byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
    return DataError(
        f"{path} is not in the encoding {encoding} ({place}); convert it to UTF-8, or name its encoding with --set "
        f"own.encoding={'utf-16' if is_utf16 else 'latin-1'}"
    )


def read_file(path: Path, settings: OwnSettings) -> Raw:
    if parts := record_parts(path, settings.encoding):
        return read_rows(parts, settings)
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    known = ", ".join((*records.SUFFIXES, ".npz"))
    raise DataError(f"{path} has none of the suffixes {known}; save it in one of these forms")


def read_npz(path: Path) -> Raw:
    """A graph of the benchmarks, or arrays x and y."""
    return read_graph_npz(path) if "adj_indptr" in array_names(path) else read_arrays(path)


def read_folder(path: Path, settings: OwnSettings) -> Raw:
    if (path / "nodes.csv").exists() and (path / "edges.csv").exists():
        return read_graph_folder(path, settings)
    if parts := record_parts(path, settings.encoding):
        return read_rows(parts, settings)
    if part_folders(path) or has_images(path):
        return read_images(path, settings)
    if loose := loose_images(path):
        raise DataError(
            f"{path} has images ({loose[0].name}) outside class folders; make one folder for each class and move its "
            "images there"
        )
    raise DataError(
        f"{path} is not data that can be read: it has none of {FORMS}; if it is the folder of the known datasets, give "
        "--dataset NAME, too"
    )


def record_parts(path: Path, encoding: str) -> list[tuple[str, records.Records]]:
    """The rows of a file, of a dataset of Hugging Face or of train.csv and test.csv, with the names of the parts; empty
    if a path is none of these."""
    if path.is_file():
        is_records = path.suffix.lower() in records.SUFFIXES
        return [("", records.read_records(path, encoding))] if is_records else []
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return records.read_hugging_face(path)
    return [(part, records.read_records(file, encoding)) for part, file in part_files(path).items()]


def part_files(path: Path) -> dict[str, Path]:
    """The files train.csv, val.csv and test.csv of a folder, or the same with other suffixes, by the name of the
    part; empty if there is no training part."""
    found = {}
    for file in sorted(path.iterdir()):
        name = file.stem.lower()
        if name in PARTS and file.suffix.lower() in records.SUFFIXES:
            found[name] = file
    ordered = {name: found[name] for name in PARTS if name in found}
    return ordered if "train" in map(PARTS.get, ordered) else {}
