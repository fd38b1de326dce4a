"""A results store: one CSV file per dataset, one row per finished run.

DATASET.csv            the rows, with the columns of `stored_run`, sorted
recipes/DATASET.json   the recipes that the column `settings` refers to, by their hash

Only `add_rows` writes. It checks everything first, so a refused run changes no file.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profcil.errors import StoreError, count
from profcil.io.atomic_files import write_files
from profcil.runs.reader import Run
from profcil.runs.results.equal_versions import first_equal_version, version_numbers
from profcil.runs.results.stored_run import COLUMNS, KEY, Row, StoredRun, parse_row, row_key, row_of_run
from profcil.runs.results.stored_settings import hash_recipe, recipe_settings

Recipes = dict[str, dict[str, Any]]  # settings by the hash of the recipe
ORDER = ("method", "setting", "part", "settings", "seed", "profcil", "execution")  # how rows are sorted


@dataclass
class Content:
    """The rows and recipes of one dataset."""

    rows: list[Row] = field(default_factory=list)
    recipes: Recipes = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A row that is to be added."""

    row: Row
    recipe: dict[str, Any]
    source: str  # the run folder, or the file and line of another store


@dataclass
class Added:
    """What `add_rows` did."""

    added: list[str] = field(default_factory=list)  # descriptions of rows
    unchanged: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)  # written


def is_store(path: str | Path) -> bool:
    """Whether a path is a CSV file, or a folder of CSV files that holds no run."""
    path = Path(path)
    if path.is_file():
        return path.suffix == ".csv"
    if not path.is_dir() or (path / "config.toml").exists():
        return False
    has_runs = any(inner.is_file() for inner in path.glob("*/config.toml"))
    return not has_runs and any(path.glob("*.csv"))


def has_store_columns(path: Path) -> bool:
    """Whether the files of a store begin with its columns. A folder is assumed to."""
    if path.is_dir():
        return True
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().rstrip("\n") == ",".join(COLUMNS)


def store_files(path: str | Path) -> list[Path]:
    """The CSV files of a store, given as a folder or as one of its files."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise StoreError(f"{path} does not exist; give the folder of a results store, or add runs to it first")
    return sorted(path.glob("*.csv"))


def load_store(path: str | Path) -> list[StoredRun]:
    """All runs of a store, checked. A damaged file is an error."""
    runs = []
    for file in store_files(path):
        content = read_content(file)
        for number, row in enumerate(content.rows, start=2):
            runs.append(parse_row(row, f"{file} line {number}", content.recipes, file))
    return runs


def comparable_rows(runs: Sequence[StoredRun], warn: Callable[[str], None] = lambda sentence: None) -> list[StoredRun]:
    """Of each method and settings the rows of versions that compute the same results, one row per seed.

    Of versions with other results those with the most seeds are kept, or the newest of several such. Of one seed the
    row of the newest version is kept.
    """
    groups: dict[tuple[str, ...], dict[str, dict[int, StoredRun]]] = {}
    for run in runs:
        rows_by_seed = groups.setdefault(without_seed(run), {}).setdefault(result_version(run), {})
        seed = run.values["seed"]
        if seed not in rows_by_seed or is_newer(run, rows_by_seed[seed]):
            rows_by_seed[seed] = run
    kept = set()
    for versions in groups.values():
        shown = max(versions, key=lambda version: (len(versions[version]), version_numbers(version)))
        kept |= set(map(id, versions[shown].values()))
    if len(kept) < len(runs):
        left_out = count(len(runs) - len(kept), "row")
        warn(f"left out: {left_out} of a results store; another version has run the same with as many seeds or more")
    return [run for run in runs if id(run) in kept]


def without_seed(run: StoredRun) -> tuple[str, ...]:
    """What runs share that differ only in seed, version and machine."""
    names = ("dataset", "method", "setting", "part", "settings")
    return tuple(run.values[name] for name in names)


def result_version(run: StoredRun) -> str:
    """The first version with the results of this run's version."""
    return first_equal_version(run.config["method"], run.values["settings"], run.values["profcil"])


def is_newer(run: StoredRun, other: StoredRun) -> bool:
    return version_numbers(run.values["profcil"]) > version_numbers(other.values["profcil"])


def read_content(file: Path) -> Content:
    """The rows and recipes of a dataset; empty if there is no file yet."""
    if not file.exists():
        return Content()
    try:
        lines = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8"), newline=""), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"{file} cannot be read as CSV ({error}); restore the file") from None
    if not lines or tuple(lines[0]) != tuple(COLUMNS):
        raise StoreError(f"{file} is not a file of a results store: its first line has other columns; restore the file")
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(COLUMNS):
            raise StoreError(
                f"{file} line {number} has {len(cells)} cells, allowed is {len(COLUMNS)}; restore the file"
            )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    check_rows(rows, file)
    return Content(rows, read_recipes(recipe_file(file)))


def check_rows(rows: Iterable[Row], file: Path) -> None:
    """Refuses rows of another dataset, two rows with one key, and two recipes behind one text of settings."""
    seen: set[tuple[str, ...]] = set()
    recipes: dict[tuple[str, ...], str] = {}
    for number, row in enumerate(rows, start=2):
        if row["dataset"] != file.stem:
            raise StoreError(f"{file} line {number} is of dataset '{row['dataset']}'; move it to that dataset's file")
        key = row_key(row)
        if key in seen:
            raise StoreError(
                f"{file} line {number} has the same {', '.join(KEY)} as an earlier line; remove one of them"
            )
        seen.add(key)
        if recipes.setdefault(averaged_key(row), row["recipe"]) != row["recipe"]:
            raise StoreError(
                f"{file} line {number} has another recipe than other seeds of its method; remove one of them"
            )


def averaged_key(row: Row) -> tuple[str, ...]:
    """What rows share that are averaged over seeds."""
    return tuple(row[column] for column in KEY if column not in ("seed", "execution"))


def recipe_file(file: Path) -> Path:
    return file.parent / "recipes" / f"{file.stem}.json"


def read_recipes(path: Path) -> Recipes:
    """The recipes of a dataset; each must have the hash that it is stored under."""
    try:
        recipes = json.loads(path.read_text(encoding="utf-8"))
        is_valid = all(hash_recipe(recipe) == name for name, recipe in recipes.items())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}); restore the file, its rows need it") from None
    if not is_valid:
        raise StoreError(f"{path} was edited: a recipe does not have the hash it is stored under; restore the file")
    return recipes


def add_runs(runs: Sequence[Run], store: Path) -> Added:
    """Adds finished runs. A run that is there already changes nothing; one that contradicts a row is refused."""
    candidates = []
    for run in runs:
        if not run.done:
            raise StoreError(
                f"{run.path} is not finished; continue it with `profcil resume {run.path}`, or leave it out"
            )
        recipe = recipe_settings(run.config["dataset"], run.config["setting"], run.config["method"])
        candidates.append(Candidate(row_of_run(run, recipe), recipe, str(run.path)))
    return add_rows(candidates, store)


def add_stores(paths: Sequence[str | Path], store: Path) -> Added:
    """Adds the rows of other stores, e.g. of another machine. The rules are those of runs."""
    candidates = []
    for file in [file for path in paths for file in store_files(path)]:
        content = read_content(file)
        for number, row in enumerate(content.rows, start=2):
            source = f"{file} line {number}"
            parse_row(row, source, content.recipes, file)  # refuses a damaged row
            candidates.append(Candidate(row, content.recipes[row["recipe"]], source))
    return add_rows(candidates, store)


def add_rows(candidates: Sequence[Candidate], store: Path) -> Added:
    """Adds rows to a store: all of them or, if one is refused, none."""
    result = Added()
    with locked(store):
        contents: dict[str, Content] = {}
        changed: dict[str, None] = {}  # an ordered set of datasets
        for candidate in candidates:
            dataset = candidate.row["dataset"]
            if dataset not in contents:
                contents[dataset] = read_content(store / f"{dataset}.csv")
            if merge_row(contents[dataset], candidate, store, result):
                changed[dataset] = None
        result.files = write_contents({name: contents[name] for name in changed}, store)
    return result


def merge_row(content: Content, candidate: Candidate, store: Path, result: Added) -> bool:
    """Adds a row to those of its dataset; whether anything changed."""
    row = candidate.row
    present = next((other for other in content.rows if row_key(other) == row_key(row)), None)
    if present is None:
        check_recipe(content, candidate)
        content.rows.append(row)
        content.recipes[row["recipe"]] = candidate.recipe
        result.added.append(describe_row(row))
        return True
    if present["digest"] != row["digest"]:
        raise StoreError(
            f"{candidate.source} (digest {row['digest'][:8]}) contradicts the row of {describe_row(present)} in "
            f"{store / present['dataset']}.csv (digest {present['digest'][:8]}): same settings, version and execution, "
            "but another result; remove the row if the run is right, or leave the run out"
        )
    result.unchanged.append(describe_row(row))
    return fill_empty_cells(present, row)


def check_recipe(content: Content, candidate: Candidate) -> None:
    """Refuses a row whose recipe was changed without a new version: it would be averaged with other settings."""
    row = candidate.row
    for other in content.rows:
        if averaged_key(other) == averaged_key(row) and other["recipe"] != row["recipe"]:
            raise StoreError(
                f"{candidate.source} contradicts the row of {describe_row(other)}: the recipe of version "
                f"{row['profcil']} has changed since; remove the rows with the old recipe, or leave the run out"
            )


def fill_empty_cells(present: Row, row: Row) -> bool:
    """Fills cells that were not known when the row was added, such as probes; whether there were any."""
    found = [column for column, text in row.items() if text and not present[column]]
    for column in found:
        present[column] = row[column]
    return bool(found)


def describe_row(row: Row) -> str:
    """A row in a few words."""
    settings = f" ({row['settings']})" if row["settings"] else ""
    part = "" if row["part"] == "test" else f" on {row['part']} data"
    return f"{row['method']}{settings} on {row['dataset']}, {row['setting']}, seed {row['seed']}{part}"


def write_contents(contents: dict[str, Content], store: Path) -> list[Path]:
    """Writes all files of some datasets: all of them or, if one cannot be written, none."""
    files: dict[Path, bytes] = {}
    for dataset, content in contents.items():
        path = store / f"{dataset}.csv"
        used = {row["recipe"] for row in content.rows}
        recipes = {name: recipe for name, recipe in content.recipes.items() if name in used}
        files[recipe_file(path)] = (json.dumps(recipes, indent=1, sort_keys=True) + "\n").encode()
        files[path] = format_rows(content.rows).encode()
    write_files(files)
    return [path for path in files if path.suffix == ".csv"]


def format_rows(rows: Iterable[Row]) -> str:
    """The rows as CSV, sorted."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=sort_key):
        writer.writerow([row[column] for column in COLUMNS])
    return out.getvalue()


def sort_key(row: Row) -> tuple[Any, ...]:
    return tuple(int(row[column]) if column == "seed" else row[column] for column in ORDER)


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """Holds the store for one process, so that two additions at the same time lose no row. Makes the folder."""
    if store.exists() and not store.is_dir():
        raise StoreError(f"{store} is a file, allowed is the folder of a results store; name one with --store")
    store.mkdir(parents=True, exist_ok=True)
    folder = os.open(store, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
        with suppress(OSError):  # fails unless the folder is empty: a refused run leaves no new folder behind
            store.rmdir()
