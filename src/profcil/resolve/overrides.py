"""`--set key=value`: a key is the dotted path of a setting, or its last part where that is unique."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from profcil.config import OWN
from profcil.errors import ConfigError, nearest
from profcil.plain_values import read_text
from profcil.resolve.run_config import LIST_HINT, SECTIONS, TOP_LEVEL, RunConfig

IN_FULL = (f"{OWN}.", "channel.", "clock.")  # sections whose settings have no short name
Sets = Iterable[str] | Mapping[str, Any]  # texts `key=value` of a command line, or keys and values


def apply_sets(values: dict[str, Any], sets: Sets, params: type) -> None:
    """Writes `--set key=value` into the values. A key is a dotted path or its last part."""
    types = known_paths(params)
    for key, value in pairs_of(sets):
        path = find_path(key.strip(), types)
        section, _, name = path.rpartition(".")
        table = values.setdefault(section, {}) if section else values
        table[name] = value if isinstance(sets, Mapping) else read_text(value, types[path])


def pairs_of(sets: Sets) -> Iterable[tuple[str, Any]]:
    """Key and value of each `--set`."""
    if isinstance(sets, Mapping):
        return sets.items()
    return map(split, sets)


def split(item: str) -> tuple[str, str]:
    """Key and value of the text `key=value`."""
    key, sign, text = item.partition("=")
    if not sign:
        raise ConfigError(f"--set {item} has no '='; write --set key=value")
    return key, text.strip()


def known_paths(params: type) -> dict[str, Any]:
    """The dotted path of every key of `--set`, with the type of its value."""
    settable = TOP_LEVEL - {"dataset", "method"}
    paths = {f.name: type(f.default) for f in dataclasses.fields(RunConfig) if f.name in settable}
    for section, cls in {**SECTIONS, "params": params}.items():
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            paths[f"{section}.{f.name}"] = hints[f.name]
    return paths


def find_path(key: str, paths: Iterable[str]) -> str:
    """The dotted path of a key. Settings of own data, of the channel and of clocks are written in full: a method may
    have settings `text` and `transport`, too."""
    if key in paths:
        return key
    last_parts = {path: path.split(".")[-1] for path in paths if not path.startswith(IN_FULL)}
    found = [path for path, last in last_parts.items() if last == key]
    if f"train.{key}" in found:  # `rounds` alone means training, not the warm-up
        return f"train.{key}"
    if f"privacy.{key}" in found:  # `min_support` is also an older setting of a method
        return f"privacy.{key}"
    if len(found) > 1:
        raise ConfigError(f"setting '{key}' is ambiguous; write {' or '.join(sorted(found))}")
    if not found:
        names = {*paths, *last_parts.values()}
        raise ConfigError(f"unknown setting '{key}'; {nearest(key, names)}{LIST_HINT}")
    return found[0]
