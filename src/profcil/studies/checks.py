"""What is said about a study before its first run: missing data, and plug-ins in a group of methods."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from profcil import registry
from profcil.config import OWN
from profcil.errors import DataError, count
from profcil.studies.definition import Cell, Study, expand_methods, is_finished


def missing_data(cells: Iterable[Cell], out: Path, data_dir: Path) -> str:
    """A sentence about the datasets that unfinished runs need and that are not there; empty if there are none."""
    needed: dict[str, int] = {}
    for cell in cells:
        name = cell.config.dataset
        if name != OWN and cell.applicable and not is_finished(out, cell):
            needed[name] = needed.get(name, 0) + 1
    sentences = {name: why for name in needed if (why := why_missing(name, data_dir))}
    if not sentences:
        return ""
    first, *others = sentences
    runs = sum(needed[name] for name in sentences)
    also = f"; also missing: {', '.join(others)}" if others else ""
    return f"{count(runs, 'run')} cannot start: {sentences[first]}{also}"


def why_missing(dataset: str, data_dir: Path) -> str:
    """Why a dataset cannot be loaded, as far as file names tell; empty if its files are there."""
    from profcil.data import files

    facts = registry.find("data", dataset).FACTS
    try:
        with files.read_errors(data_dir):
            found = files.inventory(facts, data_dir)
    except DataError as error:
        return str(error)
    absent = [file.path for file, path in found.items() if path is None]
    return str(files.missing(facts, data_dir, absent[0])) if absent else ""


def group_notes(study: Study) -> list[str]:
    """Which plug-in methods a group of methods, such as `all`, includes, and which it cannot."""
    groups = [variant.get("methods") or study.methods for variant in study.variants]
    names = [group for group in groups if isinstance(group, str)]
    if not names:
        return []
    notes = [f"left out: {reason}" for reason in registry.broken_plugins("methods").values()]
    included = {method for name in names for method in expand_methods(name)}
    added = sorted(included & registry.plugins("methods").keys())
    if added:
        notes.append(f'methods = "{names[0]}" includes plug-ins: {", ".join(added)}; choose others with --methods')
    return notes
