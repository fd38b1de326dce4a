"""Recipes and presets: TOML files with the values of settings, built in, of plug-ins, or written by a user."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.errors import ConfigError, unknown
from profcil.resolve.run_config import SECTIONS, SETTINGS

RECIPES = Path(__file__).parents[1] / "recipes"
PRESETS = RECIPES / "presets"
Recipe = str | Mapping[str, Any]  # a name, a path, or the values of a recipe


def read_recipe(recipe: Recipe | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """A recipe by path or by built-in name. `NAME-severe` and `NAME-homogeneous` also choose the setting."""
    if recipe is None:
        return {}
    if isinstance(recipe, Mapping):
        return copy.deepcopy(dict(recipe))
    path = Path(recipe)
    if path.suffix == ".toml" or path.is_file():
        return load_toml(path)
    names = recipe_names()
    name, _, setting = recipe.rpartition("-")
    if setting in SETTINGS and name in names:
        chosen.setdefault("setting", setting)
        return recipe_of(name)
    if recipe in names:
        return recipe_of(recipe)
    with_setting = [f"{name}-{setting}" for name in names for setting in SETTINGS]
    raise unknown("recipe", recipe, [*names, *with_setting])


def recipe_of(dataset: str) -> dict[str, Any]:
    """The recipe of a dataset: the built-in file, or `RECIPE` of a plug-in's module."""
    path = RECIPES / f"{dataset}.toml"
    if path.exists():
        return load_toml(path)
    module = registry.find("data", dataset)
    recipe = copy.deepcopy(getattr(module, "RECIPE", {}))
    return {"dataset": dataset, **recipe}


def recipe_names() -> list[str]:
    """The names of all recipes, built-in and of plug-ins that can be loaded."""
    broken = registry.broken_plugins("data")
    loadable = [name for name in registry.plugins("data") if name not in broken]
    from_plugins = {name for name in loadable if hasattr(registry.find("data", name), "RECIPE")}
    built_in = {path.stem for path in RECIPES.glob("*.toml")}
    return sorted(built_in | from_plugins)


def read_preset(name: str | None, dataset: str, method: str, setting: str) -> dict[str, Any]:
    """The values of a preset for a dataset, a method and a heterogeneity setting; empty without a name.

    The settings of the method are under `params`, so that they also override a recipe that a run has written.
    """
    if name is None:
        return {}
    if name not in preset_names():
        raise unknown("preset", str(name), preset_names())
    values = load_toml(PRESETS / f"{name}.toml")
    del values["title"]
    datasets = values.pop("datasets", {})
    values = merge(values, datasets.get(dataset, {}))
    methods = values.pop("methods", {})
    if not values and method not in methods:
        elsewhere = sorted({other for found in datasets.values() for other in found.get("methods", {})})
        others = ", ".join(sorted(methods)) or f"{', '.join(elsewhere)} on {', '.join(datasets)}"
        raise ConfigError(f"the preset {name} has nothing for {method} on {dataset}, it is for {others}; leave it out")
    sections, params = divided(methods.get(method, {}), setting)
    return {**merge(values, sections), "params": params}


def with_sections_of(values: Mapping[str, Any], method: str, setting: str) -> dict[str, Any]:
    """A recipe whose table of a method has no sections: they have overridden those of the recipe."""
    sections, params = divided(values.get("methods", {}).get(method, {}), setting)
    if not sections:
        return dict(values)
    return {**merge(values, sections), "methods": {**values["methods"], method: params}}


def divided(table: Mapping[str, Any], setting: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table of a method in a heterogeneity setting: the sections of a recipe in it (model, train), which are for
    this method alone, and its own settings."""
    params = in_setting(table, setting)
    sections = {key: params.pop(key) for key in SECTIONS if key in params}
    return sections, params


def preset_title(name: str) -> str:
    """What tables call a run by a preset."""
    return str(load_toml(PRESETS / f"{name}.toml")["title"])


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def in_setting(table: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The table of a method for one heterogeneity setting: it may have sub-tables `severe` and `homogeneous`."""
    common = {key: value for key, value in table.items() if key not in SETTINGS}
    return merge(common, table.get(setting, {}))


def load_toml(path: Path) -> dict[str, Any]:
    """The values of a recipe file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; `profcil list recipes` names the built-in ones") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"recipe {path} cannot be read as TOML: {error}") from None


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables merged key by key; the second overrides the first."""
    merged = dict(low)
    for key, value in high.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both_tables else value
    return merged
