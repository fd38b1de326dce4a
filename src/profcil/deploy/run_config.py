"""A run's complete configuration as one text, which the Flower app carries to every node."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from profcil.deploy.sites.federation import Federation
from profcil.errors import ConfigError
from profcil.protocol.clock_settings import ClockSettings
from profcil.resolve import RunConfig, chosen_setting, finish, merge, read_preset, read_recipe, to_toml

SIMULATED_TIME = ("latency", "example_seconds", "spread", "stragglers", "slowdown", "dropout", "available", "day")
SUPPORT_AT_SITES = 2  # the data of sites may be of persons, and the mean of a class with one example is that example


def config_to_text(config: RunConfig) -> str:
    """The configuration as TOML."""
    check_deployable(config)
    return to_toml(config)


def config_from_text(text: str) -> RunConfig:
    """The configuration that `config_to_text` wrote."""
    try:
        values = tomllib.loads(text)
        config = finish(values, str(values["method"]), [])
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"the app's recipe is not a complete recipe ({error}); write the app again with `profcil deploy app`"
        ) from None
    check_deployable(config)
    return config


def check_deployable(config: RunConfig) -> None:
    """Refuses what runs in simulation only."""
    if simulated := simulated_time(config):
        raise ConfigError(
            f"clock.{simulated} simulates the time that clients take, and a deployment has real ones; leave it out, or "
            "try it with `profcil run`"
        )


def simulated_time(config: RunConfig) -> str:
    """A setting that only simulated clocks follow; empty if there is none. `buffer` also says for whom a deployment's
    server waits."""
    if config.clock.mode == "wait":
        return "mode = wait"
    plain = ClockSettings()
    return next((name for name in SIMULATED_TIME if getattr(config.clock, name) != getattr(plain, name)), "")


def sites_config(federation: Federation, recipe: str | None, flags: Mapping[str, Any], sets: list[str]) -> RunConfig:
    """The configuration of a run on the sites' own data. The federation sets dataset, clients and task size.
    Unlike elsewhere, classes with one example at a site are in no statistics by default."""
    chosen = {k: v for k, v in flags.items() if v is not None and k != "dataset"}
    sites = len(federation.sites)
    longest = max(map(len, federation.tasks))
    defaults = {"stream": {"participants": sites}, "privacy": {"min_support": SUPPORT_AT_SITES}}
    fixed = {"dataset": "sites", "stream": {"clients": sites, "task_size": longest}}
    preset = chosen.pop("preset", None)
    given = read_recipe(recipe, chosen)
    method = str({**given, **chosen}.get("method", "promax"))
    setting = chosen_setting({**given, **chosen}, sets)
    given = merge(given, read_preset(preset, "sites", method, setting))
    values = merge(defaults, merge(given, chosen))
    values = merge(values, fixed)
    config = finish(values, str(values.get("method", "promax")), sets)
    if config.evaluate != "test":
        raise ConfigError("sites have no validation data, so --evaluate must be test; leave out --evaluate")
    if config.train.early_stop:
        raise ConfigError("sites have no validation data, which --early-stop needs; leave out --early-stop")
    return config
