"""The settings of a run in a results store: a recipe, and the settings in which the run differs from it.

The recipe is what `profcil run --dataset D --setting S --method M` has at the time the run is added. Recipes change, so
the store keeps a copy. Settings are in the form of config.toml, by their dotted names.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from profcil.config import OWN
from profcil.errors import StoreError
from profcil.runs.settings_check import MACHINE, flatten_settings

NAMES = ("dataset", "method", "setting", "seed", "evaluate")  # have columns of their own
# `regime` only changes settings of the method, which count.
WITHOUT_EFFECT = (*MACHINE, "keep_memories", "keep_states", "regime")
PLAIN_TEXT = re.compile(r"[A-Za-z_][\w.+-]*")


def comparable_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.toml that determine a result, without those that have columns of their own."""
    flat = flatten_settings(config)
    return {key: flat[key] for key in sorted(flat) if key not in (*NAMES, *WITHOUT_EFFECT)}


def recipe_settings(
    dataset: str, setting: str, method: str, preset: str | None = None, regime: str | None = None
) -> dict[str, Any]:
    """The settings that a run has now by the recipe alone, by a preset, or by the recipe with another budget."""
    from profcil.resolve import resolve, to_toml

    if dataset == OWN:
        raise StoreError("a run on own data has no recipe to compare with; a results store holds named datasets only")
    sets = [f"regime={regime}"] if regime else []
    config = resolve(None, {"dataset": dataset, "setting": setting, "method": method, "preset": preset}, sets)
    return comparable_settings(tomllib.loads(to_toml(config)))


def hash_recipe(recipe: Mapping[str, Any]) -> str:
    """The name under which the store keeps a recipe."""
    return hashlib.blake2b(canonical_json(recipe).encode(), digest_size=8).hexdigest()


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def describe_differences(settings: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The differing settings as sorted `key=value` pairs. `key=` is a setting of the recipe that the run lacks."""
    pairs = []
    for key in sorted({*settings, *recipe}):
        if key not in settings:
            pairs.append(f"{key}=")
        elif key not in recipe or canonical_json(settings[key]) != canonical_json(recipe[key]):
            pairs.append(f"{key}={format_value(settings[key])}")
    return " ".join(pairs)


def apply_differences(recipe: Mapping[str, Any], differences: str) -> dict[str, Any]:
    """The settings of a run, from the recipe and the text of `describe_differences`."""
    settings = dict(recipe)
    for pair in differences.split():
        key, sign, text = pair.partition("=")
        if not (key and sign):
            raise ValueError(f"'{pair}' is not a pair key=value")
        if text:
            settings[key] = parse_value(text)
        else:
            settings.pop(key, None)
    return {key: settings[key] for key in sorted(settings)}


def format_value(value: Any) -> str:
    """A value without spaces: a plain word as it is, anything else as JSON."""
    if isinstance(value, str) and PLAIN_TEXT.fullmatch(value) and parse_value(value) == value:
        return value
    return canonical_json(value).replace(" ", "\\u0020")


def parse_value(text: str) -> Any:
    """The inverse of `format_value`."""
    try:
        return json.loads(text)
    except ValueError:
        if PLAIN_TEXT.fullmatch(text):
            return text
        raise


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names as the nested tables of a config.toml."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        table = nested.setdefault(section, {}) if section else nested
        table[name] = value
    return nested
