"""A configuration as plain values and as a recipe that resolves to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from profcil import registry
from profcil.config import OWN
from profcil.plain_values import NONE, plain
from profcil.resolve.run_config import SECTIONS, RunConfig


def values_of(config: RunConfig) -> dict[str, Any]:
    """The settings as nested dicts of plain values. How own data is read is left out where there is none; robust
    aggregation and early stopping where they are off; settings of privacy, channel and clocks that have their
    defaults."""
    values = plain(config)
    if config.robust.aggregation == "mean":
        values.pop("robust")
    if config.dataset != OWN:
        values.pop(OWN, None)
    if not config.train.early_stop:
        values["train"].pop("early_stop")
    for section in ("privacy", "channel", "clock"):
        off = plain(SECTIONS[section]())
        chosen = {key: value for key, value in values.pop(section).items() if value != off[key]}
        if chosen:
            values[section] = chosen
    return values


def plugin_origins(config: RunConfig) -> dict[str, Any]:
    """Where the method, dataset and encoder of a run come from, for those that are plug-ins."""
    origins = {}
    for kind, name in part_names(config).items():
        origin = registry.origin(kind, name)
        if origin:
            origins[kind] = origin
    return origins


def part_names(config: RunConfig) -> dict[str, str]:
    """The names of a run's method, dataset and encoder; the encoder is empty if it is a built-in default."""
    encoder = config.model.encoder
    if not encoder and config.dataset in registry.plugins("data"):
        encoder = registry.find("data", config.dataset).FACTS.encoder
    return {"methods": config.method, "data": config.dataset, "encoders": encoder}


def to_toml(config: RunConfig) -> str:
    """The configuration as a recipe that resolves to it. A None that is also the default is left out."""
    values = values_of(config)
    regime = registry.find("methods", config.method).METHOD.regimes.get(config.regime, {})
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    lines = toml_lines({k: v for k, v in values.items() if k not in tables})
    for name, table in tables.items():
        fields = dataclasses.fields(getattr(config, name))
        none_by_default = {f.name for f in fields if f.default is None} - {*regime}
        kept = {k: v for k, v in table.items() if v is not None or k not in none_by_default}
        lines += ["", f"[{name}]", *toml_lines(kept)]
    return "\n".join(lines) + "\n"


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """A line of TOML for each value."""
    return [f"{key} = {toml_value(value)}" for key, value in values.items()]


def toml_value(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(k)} = {toml_value(v)}" for k, v in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # JSON has no `inf`
    return json.dumps(NONE if value is None else value, ensure_ascii=False)
