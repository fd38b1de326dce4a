"""The settings in which some runs differ, and only those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from profcil.runs.settings_check import WITHOUT_EFFECT, flatten_settings


def describe_settings(settings: Mapping[str, Any]) -> list[str]:
    """Each setting as `key=value`; a key without its section, unless another one ends the same."""
    names = short_names(settings)
    return [f"{name}={plain_text(value)}" for name, value in zip(names, settings.values(), strict=True)]


def short_names(keys: Iterable[str]) -> list[str]:
    """The last part of each dotted name; the whole name if another one ends the same."""
    keys = list(keys)
    ends = [key.split(".")[-1] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def plain_text(value: Any) -> str:
    """A value as TOML writes it, but texts without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each of some runs the settings in which they differ, by dotted name.

    A setting that a run of an older version does not have is left out of its own.
    """
    with_task = has_several_weak_tasks(configs)
    shown = [shown_settings(config, with_task) for config in configs]
    keys = [key for key in ordered_union(shown) if values_differ(shown, key)]
    return [{key: settings[key] for key in keys if key in settings} for settings in shown]


def values_differ(tables: Sequence[Mapping[str, Any]], key: str) -> bool:
    first = tables[0].get(key)
    return any(table.get(key) != first for table in tables)


def has_several_weak_tasks(configs: Iterable[Mapping[str, Any]]) -> bool:
    streams = [config.get("stream", {}) for config in configs]
    tasks = {stream.get("weak_task", -1) for stream in streams}
    return len(tasks - {-1}) > 1


def ordered_union(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def shown_settings(config: Mapping[str, Any], with_task: bool) -> dict[str, Any]:
    """The settings as a label shows them, without those that change no result.

    A weak task is one entry: its strength and, if asked for, its number.
    """
    settings = {key: value for key, value in flatten_settings(config).items() if key not in WITHOUT_EFFECT}
    task = settings.pop("stream.weak_task", None)
    strength = settings.pop("stream.weak_strength", None)
    if task is None:
        return settings
    if task < 0:
        settings["weak"] = "none"
    else:
        settings["weak"] = f"{strength}, task {task + 1}" if with_task else strength
    return settings
