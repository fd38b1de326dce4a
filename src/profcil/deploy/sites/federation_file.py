"""Reads federation.toml. Any mistake in it is an error that says what is allowed."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from profcil.data.own.assemble import ENCODERS
from profcil.deploy.sites.federation import Federation, Later
from profcil.errors import ConfigError, nearest, unknown

LISTS = "sites, views, columns and tasks"
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
MAX_SIZE = 10_000_000  # of a text's length, a vocabulary, a side of an image or the features of a node


def read_federation(text: str, source: str = "federation.toml") -> Federation:
    """The terms from the text of a federation.toml. Any mistake in it raises a ConfigError."""
    values = parse_toml(text, source)
    known = {f.name for f in fields(Federation)} - {"declared"}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}' in {source}; {nearest(key, known)}")
    try:
        later = read_later(values.pop("later", []), source)
        federation = Federation(**{key: lists_to_tuples(value) for key, value in values.items()}, later=later)
    except TypeError:
        raise ConfigError(f"{source} must give modality, tasks and sites; docs/deployment.md describes them") from None
    check_types(federation, source)
    if federation.modality not in ENCODERS:
        raise unknown("modality", str(federation.modality), ENCODERS)
    check_columns(federation, source)
    check_keys(federation, source)
    for names in (federation.sites, federation.classes):
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{source} must name at least one site and one class, and none of them twice")
    check_later(federation, source)
    return federation


def read_later(tables: Any, source: str) -> tuple[Later, ...]:
    """The [[later]] tables."""
    found = []
    for table in tables if isinstance(tables, list) else [tables]:
        is_table = isinstance(table, dict) and table.keys() == {"position", "tasks"}
        tasks = lists_to_tuples(table["tasks"]) if is_table else ()
        are_lists = isinstance(tasks, tuple) and bool(tasks) and all(isinstance(task, tuple) for task in tasks)
        if not are_lists or not is_count(table["position"], 2):
            raise wrong_type(source, "a [[later]] table", "position = N (from 2 on) and tasks = [[...]]")
        if not all(isinstance(name, str) for task in tasks for name in task):
            raise wrong_type(source, "the tasks of a [[later]] table", "lists of texts")
        found.append(Later(table["position"], tasks))
    return tuple(found)


def check_later(federation: Federation, source: str) -> None:
    """Checks that later tasks come in order, before the last position begins, and within the reserve."""
    if not is_count(federation.reserve, 0):
        raise wrong_type(source, "reserve", "a whole number of at least 0")
    positions = len(federation.tasks)
    before = 2
    for entry in federation.later:
        if not before <= entry.position <= positions:
            raise ConfigError(
                f"{source} declares tasks from position {entry.position} on, allowed is {before} to {positions}: in "
                "order, and before the last position of the tasks known until then begins"
            )
        before = entry.position
        positions += len(entry.tasks)
    names = [name for entry in federation.later for task in entry.tasks for name in task]
    if len(names) > federation.reserve:
        raise ConfigError(
            f"{source} declares {len(names)} classes later, but reserve = {federation.reserve}; the model has "
            "outputs for the reserve only, so raise it before the run starts"
        )
    if len({*names, *federation.classes}) < len(names) + len(federation.classes):
        raise ConfigError(f"{source} names a class twice; name each class once, at the start or later")


def check_types(federation: Federation, source: str) -> None:
    """Refuses values of a wrong type, and sizes below 1."""
    texts = (federation.modality, federation.encoder)
    tasks = checked_list(federation.tasks, source, "tasks", "lists")
    lists = (federation.sites, federation.views or (), federation.columns, *tasks)
    for name, value in zip(("modality", "encoder"), texts, strict=True):
        if not isinstance(value, str):
            raise wrong_type(source, name, "a text")
    for value in lists:
        if not all(isinstance(item, str) for item in checked_list(value, source, LISTS, "texts")):
            raise wrong_type(source, LISTS, "lists of texts")
    for numbers in (federation.mean, federation.std):
        if not all(is_number(item) for item in checked_list(numbers, source, "mean and std", "numbers")):
            raise wrong_type(source, "mean and std", "lists of finite numbers")
    if not all(is_count(size, 1) for size in (federation.length, federation.vocabulary)):
        raise wrong_type(source, "length and vocabulary", "whole numbers of at least 1")
    if not is_count(federation.max_examples, 1):
        raise wrong_type(source, "max_examples", f"a whole number from 1 to {MAX_SIZE}")
    if not is_count(federation.features, 0):
        raise wrong_type(source, "features", "a whole number of at least 0")
    shape = checked_list(federation.shape, source, "shape", "whole numbers")
    if len(shape) != 3 or not all(is_count(size, 1) for size in shape):
        raise wrong_type(source, "shape", "three whole numbers: channels, height and width")


def checked_list(value: Any, source: str, name: str, of: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise wrong_type(source, name, f"a list of {of}")
    return value


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_count(value: Any, low: int) -> bool:
    return type(value) is int and low <= value <= MAX_SIZE


def wrong_type(source: str, name: str, expected: str) -> ConfigError:
    return ConfigError(f"{source} gives {name} in a wrong form, it must be {expected}; docs/deployment.md shows one")


def check_columns(federation: Federation, source: str) -> None:
    """Checks that a table has columns, and one mean and one deviation of each or none."""
    count = len(federation.columns)
    if federation.modality == "table" and not count:
        raise ConfigError(f"{source} must name the columns of the table; write columns = [...]")
    for name in ("mean", "std"):
        given = len(getattr(federation, name))
        if given not in (0, count):
            raise ConfigError(f"{source} has {given} values in {name} for {count} columns; give one for each column")
    if any(value <= 0 for value in federation.std):
        raise ConfigError(f"{source} has a deviation (std) that is not above 0; give positive numbers")


def check_keys(federation: Federation, source: str) -> None:
    """Checks that keys are fingerprints of sites, each of one site only."""
    keys = federation.keys
    if not isinstance(keys, Mapping) or not all(FINGERPRINT.fullmatch(str(key)) for key in keys.values()):
        raise wrong_type(source, "keys", "a table of sites with fingerprints SHA256:... as `ssh-keygen -l` prints them")
    for site in keys:
        if site not in federation.sites:
            raise unknown("site", site, federation.sites)
    if len(set(keys.values())) < len(keys):
        raise ConfigError(f"{source} gives one key to two sites; each site has a key of its own")


def lists_to_tuples(value: Any) -> Any:
    """A TOML value in which lists, and lists within them, are tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)


def parse_toml(text: str, source: object) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read as TOML: {error}") from None
