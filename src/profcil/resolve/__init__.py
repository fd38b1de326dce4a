"""The configuration of a run, from recipes, presets, flags and `--set`.

run_config     what a configuration holds
recipe_files   recipes and presets in TOML files
overrides      `--set key=value`
resolving      all of it put together, and checked
as_toml        a configuration written as a recipe
"""

from profcil.resolve.as_toml import plugin_origins, to_toml, toml_value, values_of
from profcil.resolve.overrides import Sets, find_path, known_paths, pairs_of
from profcil.resolve.recipe_files import (
    PRESETS,
    RECIPES,
    Recipe,
    load_toml,
    merge,
    preset_names,
    preset_title,
    read_preset,
    read_recipe,
    recipe_names,
    recipe_of,
)
from profcil.resolve.resolving import chosen_setting, finish, own_values, resolve
from profcil.resolve.run_config import REGIMES, SECTIONS, SETTINGS, TOP_LEVEL, RunConfig

__all__ = [
    "PRESETS",
    "RECIPES",
    "REGIMES",
    "SECTIONS",
    "SETTINGS",
    "TOP_LEVEL",
    "Recipe",
    "RunConfig",
    "Sets",
    "chosen_setting",
    "find_path",
    "finish",
    "known_paths",
    "load_toml",
    "merge",
    "own_values",
    "pairs_of",
    "plugin_origins",
    "preset_names",
    "preset_title",
    "read_preset",
    "read_recipe",
    "recipe_names",
    "recipe_of",
    "resolve",
    "to_toml",
    "toml_value",
    "values_of",
]
