"""The preset by which a run was made. `--preset plus` is not recorded, but the settings of the preset are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from profcil.errors import ConfigError
from profcil.resolve import preset_names, read_preset
from profcil.resolve.recipe_files import RECIPES, in_setting, recipe_of, with_sections_of
from profcil.runs.differences import differing_settings
from profcil.runs.settings_check import flatten_settings

PRESET = "preset"  # stands for all settings of a preset


def named_differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As `differing_settings`, but a run by a preset has the setting `preset`, also if no other run differs from it.
    Further settings are those in which it differs from other runs by the same preset."""
    presets = [preset_of(config) for config in configs]
    named: list[dict[str, Any]] = [{} for _ in configs]
    for preset in dict.fromkeys(presets):
        places = [place for place, found in enumerate(presets) if found == preset]
        differing = differing_settings([configs[place] for place in places])
        for place, settings in zip(places, differing, strict=True):
            named[place] = {PRESET: preset, **settings} if preset else settings
    return named


def preset_of(config: Mapping[str, Any]) -> str:
    """The name of the preset whose settings a run has, of several that with the most settings; empty if there is
    none."""
    dataset, setting, method = (str(config[name]) for name in ("dataset", "setting", "method"))
    own = flatten_settings(config)
    recipe = recipe_values(dataset, method, setting)
    found = {"": 0}
    for preset in preset_names():
        wanted = settings_of(preset, dataset, method, setting)
        if all(recipe.get(key) == value for key, value in wanted.items()):
            continue  # it changes nothing
        if all(own.get(key) == value for key, value in wanted.items()):
            found[preset] = len(wanted)
    return max(found, key=lambda preset: found[preset])


@cache
def recipe_values(dataset: str, method: str, setting: str) -> dict[str, Any]:
    """What the built-in recipe of a dataset says for a method, by dotted names; empty without one."""
    if not (RECIPES / f"{dataset}.toml").is_file():
        return {}
    recipe = with_sections_of(recipe_of(dataset), method, setting)
    params = in_setting(recipe.pop("methods", {}).get(method, {}), setting)
    return flatten_settings({**recipe, "params": params})


@cache
def settings_of(preset: str, dataset: str, method: str, setting: str) -> dict[str, Any]:
    """The settings of a preset by their dotted names; empty if it has none for this method."""
    with suppress(ConfigError):
        return flatten_settings(read_preset(preset, dataset, method, setting))
    return {}
