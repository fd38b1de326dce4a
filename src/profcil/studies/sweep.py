"""A sweep: one command with several values for some settings. Every combination is one run of a grid.

On the command line values are separated by commas: `--set noise=0.1,0.2 --seed 0,1`. A list keeps its brackets:
`--set taus=[1,2],[3,4]` has two values. From Python several values are a list, and a value that is a list itself is a
tuple. Settings of own data (`own.label`) are never swept, since names of columns may have commas.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from profcil.config import OWN
from profcil.errors import ConfigError
from profcil.plain_values import is_tuple
from profcil.resolve import Recipe, RunConfig, Sets, find_path, known_paths, pairs_of, resolve
from profcil.studies.definition import Cell, supports_modality, with_differences

FLAGS = ("dataset", "method", "setting", "seed")  # flags that may have several values
Axes = dict[str, list[Any]]  # the values of each flag or setting


def is_sweep(flags: Mapping[str, Any], sets: Sets) -> bool:
    """Whether a flag or a setting has several values."""
    axes = {**flag_axes(flags), **set_axes(sets)}
    return any(len(values) > 1 for values in axes.values())


def sweep_cells(recipe: Recipe | None, flags: Mapping[str, Any], sets: Sets) -> list[Cell]:
    """A run for every combination of values, in the order given."""
    of_flags = flag_axes(flags)
    of_sets = set_axes(sets)
    fixed = {key: values for key, values in of_sets.items() if len(values) == 1}
    cells: dict[str, Cell] = {}
    for chosen in combinations(of_flags):
        if len(fixed) < len(of_sets):
            (without_swept,) = combinations(fixed)
            check_lists(resolve(recipe, chosen, as_given(without_swept, sets)), of_sets)
        for settings in combinations(of_sets):
            config = resolve(recipe, chosen, as_given(settings, sets))
            applicable = config.dataset == OWN or supports_modality(config.method, config.dataset)
            cell = Cell(config, "", applicable)
            cells.setdefault(cell.name, cell)
    return with_differences(list(cells.values()))


def combinations(axes: Axes) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def as_given(settings: Mapping[str, Any], sets: Sets) -> Sets:
    """One combination in the form of `sets`: a mapping, or texts of a command line."""
    return settings if isinstance(sets, Mapping) else [f"{key}={value}" for key, value in settings.items()]


def flag_axes(flags: Mapping[str, Any]) -> Axes:
    """The values of every flag. A file of a method may have a comma in its name."""
    axes = {}
    for name, value in flags.items():
        is_one = name not in FLAGS or Path(str(value)).is_file()
        axes[name] = [value] if is_one else several(name, value)
    return axes


def set_axes(sets: Sets) -> Axes:
    """The values of every setting."""
    axes = {}
    for key, value in pairs_of(sets):
        key = key.strip()
        is_text = isinstance(sets, Mapping) and isinstance(value, str)  # from Python only a list has several values
        is_one = is_text or key.startswith(f"{OWN}.")
        axes[key] = [value] if is_one else several(key, value)
    return axes


def several(name: str, value: Any) -> list[Any]:
    """The values in a text with commas, or in a list."""
    values = split_text(value) if isinstance(value, str) else value
    if not isinstance(values, list):
        return [value]
    if not values or (len(values) > 1 and "" in values):
        raise ConfigError(f"{name} = {value!r} has an empty value; write the values with one comma between two")
    return values


def split_text(text: str) -> list[str]:
    """The parts between commas, except commas inside brackets or quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character == "[") - (character == "]")
        if character == "," and not quote and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def check_lists(config: RunConfig, axes: Axes) -> None:
    """Refuses `key=1,2` if the setting is a list: it may mean one list or two values."""
    kinds = known_paths(type(config.params))
    for key, values in axes.items():
        if len(values) == 1 or not is_tuple(kinds[find_path(key, kinds)]):
            continue
        if not all(isinstance(value, tuple) or str(value).startswith("[") for value in values):
            text = ",".join(map(str, values))
            raise ConfigError(
                f"{key} is a list, so {key}={text} may mean one list or {len(values)} values; write {key}=[{text}] for "
                "one list, or each value in brackets"
            )
