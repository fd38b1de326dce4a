"""What is wrong with the data of a site's folder, and how many examples of each label it has."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.config import OwnSettings
from profcil.data._pixels import header
from profcil.data.own.graphs import read_graph_folder
from profcil.data.own.images import class_images
from profcil.data.own.records import read_records
from profcil.deploy.sites.federation import Federation
from profcil.errors import ProfcilError, file_error, nearest

if TYPE_CHECKING:
    from profcil.deploy.sites.site_check import SiteCheck


def check_data(result: SiteCheck, manifest: Mapping[str, Any], terms: Federation) -> None:
    """Counts the examples of each label, and finds what is wrong with the files."""
    if "data" not in manifest:
        return
    path = result.folder / str(manifest["data"])
    if not path.exists():
        result.faults.append(f"{path} does not exist; put the data there or change the manifest")
        return
    checks = {"text": check_rows, "table": check_rows, "image": check_images, "graph": check_graph}
    check = checks[terms.modality]
    try:
        check(result, path, terms)
    except ProfcilError as error:
        result.faults.append(str(error))
    except OSError as error:
        result.faults.append(str(file_error(error)))
    except (UnicodeDecodeError, KeyError, ValueError, TypeError, csv.Error) as error:
        result.faults.append(
            f"{path} cannot be read as {terms.modality} data ({error}); docs/deployment.md describes the format"
        )


def check_rows(result: SiteCheck, path: Path, terms: Federation) -> None:
    """A file of texts, or a table of numbers."""
    columns = read_records(path).columns
    needed = ("label", *(("text",) if terms.modality == "text" else terms.columns))
    for name in needed:
        if name not in columns:
            result.faults.append(f"{path} has no column '{name}', which the federation needs; add it")
    count_labels(result, path, columns.get("label", ()), terms)
    if terms.modality == "table" and all(name in columns for name in needed):
        terms.input_format().encode_columns(columns, path)  # raises an error at a cell that is no number


def check_images(result: SiteCheck, path: Path, terms: Federation) -> None:
    """A folder of class folders. Each file is opened, and its pixels are decoded later, by `read_site`."""
    labels: list[str] = []
    sizes: Counter[tuple[int, int]] = Counter()
    for name, files in class_images(path):
        labels += [name] * len(files)
        if not files:
            result.notes.append(f"the class folder {path / name} has no images")
        for file in files:
            found = header(file)
            if found is None:
                result.faults.append(f"{file} cannot be read as an image; remove or replace it")
            else:
                sizes[found[1:]] += 1
    count_labels(result, path, labels, terms)
    _, height, width = terms.shape
    resized = sizes.total() - sizes[height, width]
    if resized:
        result.notes.append(
            f"{resized} of {sizes.total()} images have another size and are resized to {height} x {width}"
        )


def check_graph(result: SiteCheck, path: Path, terms: Federation) -> None:
    raw = read_graph_folder(path, OwnSettings(label="label"))
    given = len(raw.columns)
    if given != terms.features:
        result.faults.append(
            f"{path / 'nodes.csv'} has {given} features where the federation has {terms.features}; "
            "give nodes the agreed features"
        )
    count_labels(result, path, raw.labels, terms)


def count_labels(result: SiteCheck, path: Path, labels: Any, terms: Federation) -> None:
    """Notes how many examples each label has, and each label that is no class of the federation."""
    counts = Counter(str(label) for label in labels)
    result.classes = dict(sorted(counts.items()))
    if not counts:
        result.faults.append(f"{path} has no examples; put labelled data there")
    for name, count in result.classes.items():
        if may_be_declared(name, terms):
            result.notes.append(f"{path} has {count} examples of {undeclared(name)}")
        elif name not in terms.classes:
            result.faults.append(
                f"{path} has {count} examples with the label '{name}', which is not a class of the federation; "
                f"{nearest(name, terms.classes)}"
            )


def may_be_declared(name: str, terms: Federation) -> bool:
    """Whether a name is no class of the federation, which may declare more classes."""
    return terms.grows and name not in terms.classes


def undeclared(name: str) -> str:
    return f"the class '{name}', which the federation has not declared; it is left aside until then"
