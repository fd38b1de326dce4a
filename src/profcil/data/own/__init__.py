"""Own data: files and folders in common forms, without writing Python.

`describe` counts what is there, for the defaults of a run; `load` makes a Bundle of it. How the files are read is said
by `OwnSettings`, the section [own] of a run's settings.

    texts    a CSV, TSV, JSON, JSONL or Parquet file with a column of texts and one of labels
    a table  the same with columns of numbers instead of texts
    images   a folder with one folder of images per class
    a graph  a folder with nodes.csv and edges.csv, or an npz with adj_*, attr_* and labels
    arrays   an npz with x and y, or a Bundle that `save_bundle` wrote
    datasets of Hugging Face, as `save_to_disk` writes them, and folders with train.csv, test.csv
"""

from __future__ import annotations

from pathlib import Path

from profcil.config import OwnSettings
from profcil.data.bundle import Bundle, Facts
from profcil.data.own.arrays import is_saved_bundle, load_saved_bundle, save_arrays, save_bundle, save_texts
from profcil.data.own.assemble import bundle_of, describe_raw
from profcil.data.own.defaults import recipe_of_data
from profcil.data.own.forms import read_raw
from profcil.data.own.raw import DataSummary

__all__ = ["FACTS", "describe", "load", "recipe", "save_arrays", "save_bundle", "save_texts"]

FACTS = Facts("own", "Own data", "", 0, None, None, get="--data PATH")  # replaced by those of the data


def describe(path: Path, settings: OwnSettings) -> DataSummary:
    """What the data is and how much there is of it."""
    if is_saved_bundle(path):
        return DataSummary.of_bundle(path, load_saved_bundle(path))
    return describe_raw(path, read_raw(path, settings), settings)


def recipe(path: Path, settings: OwnSettings) -> tuple[dict, tuple[str, ...]]:
    """The settings of a run on this data that follow from its kind and size, and notes for the user."""
    summary = describe(path, settings)
    return recipe_of_data(summary, settings), summary.notes


def load(path: Path, seed: int, settings: OwnSettings) -> Bundle:
    """The data as a Bundle."""
    if is_saved_bundle(path):
        return load_saved_bundle(path)
    return bundle_of(path, read_raw(path, settings), settings, seed)
