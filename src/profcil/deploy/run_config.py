"""A run's whole configuration as one text, which travels with the Flower app to every node."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from profcil.deploy.federation import Federation
from profcil.errors import ConfigError
from profcil.resolve import RunConfig, finish, merge, read_preset, to_toml
from profcil.resolve import read_recipe as read_file


def write_recipe(config: RunConfig) -> str:
    """Turns are computed one by one, as the serial simulation does it: then every bit is the same."""
    return to_toml(replace(config, accelerate="off"))


def sites_recipe(terms: Federation, recipe: str | None, flags: Mapping[str, Any], sets: list[str]) -> RunConfig:
    """The configuration of a run on sites' own data: clients and tasks are theirs, the rest as everywhere."""
    chosen = {k: v for k, v in flags.items() if v is not None and k != "dataset"}
    preset = chosen.pop("preset", None)
    sites, longest = len(terms.sites), max(map(len, terms.tasks))
    given = read_file(recipe, chosen)
    method = str({**given, **chosen}.get("method", "promax"))
    given = merge(given, read_preset(preset, "sites", method))
    values = merge({"stream": {"participants": sites}}, merge(given, chosen))
    values = merge(values, {"dataset": "sites", "stream": {"clients": sites, "task_size": longest}})
    config = finish(values, str(values.get("method", "promax")), sets)
    if config.evaluate != "test":
        raise ConfigError("sites have no validation part; leave out --evaluate")
    return config


def read_recipe(text: str) -> RunConfig:
    try:
        values = tomllib.loads(text)
        return finish(values, str(values["method"]), [])
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(
            f"the app's recipe is not a complete recipe ({error}); write the app again with `profcil deploy app`"
        ) from None
