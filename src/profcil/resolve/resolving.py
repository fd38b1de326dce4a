"""Makes the complete, checked configuration of a run from a recipe, flags and `--set`.

The order, later entries override earlier ones: the built-in recipe of the dataset, the given recipe, the preset, the
heterogeneity setting, flags, `--set`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.config import OWN, SITES, OwnSettings
from profcil.errors import ConfigError, DataNote, nearest, unknown
from profcil.plain_values import build, coerce, read_text
from profcil.protocol.settings import StreamSettings
from profcil.resolve.overrides import Sets, apply_sets, pairs_of
from profcil.resolve.recipe_files import (
    Recipe,
    in_setting,
    merge,
    read_preset,
    read_recipe,
    recipe_of,
    with_sections_of,
)
from profcil.resolve.run_config import LIST_HINT, SECTIONS, SETTINGS, TOP_LEVEL, RunConfig


def resolve(recipe: Recipe | None = None, flags: Mapping[str, Any] | None = None, sets: Sets = ()) -> RunConfig:
    """The configuration of a command line or of a Python call.

    The flag `preset` names a preset. `data` is a path: own data, if no dataset is named. `tasks` divides own data.
    """
    chosen = {key: value for key, value in (flags or {}).items() if value is not None}
    preset = chosen.pop("preset", None)
    data = chosen.pop("data", None)
    tasks = chosen.pop("tasks", None)
    given = read_recipe(recipe, chosen)
    default = "digits" if data is None else OWN
    dataset = {"dataset": default, **given, **chosen}["dataset"]
    if not isinstance(dataset, str) or dataset not in (OWN, SITES, *registry.names("data")):
        raise unknown("dataset", str(dataset), registry.names("data"))
    if tasks is not None and (dataset != OWN or data is None):
        raise ConfigError("--tasks divides own data, which --data PATH gives; else set stream.task_size")
    check_types(given)
    built_in = {} if dataset in (OWN, SITES) else recipe_of(dataset)
    named = {**built_in, **given, **chosen}
    which = str(named.get("method", "promax")), chosen_setting(named, sets)
    given = with_sections_of(given, *which)
    if dataset == SITES:
        values = recorded_sites_run(given)
    elif dataset != OWN:
        values = merge(with_sections_of(built_in, *which), given)
    elif data is not None:
        values = own_recipe(Path(data), given, sets, tasks)
    else:
        values = recorded_own_run(given)
    if registry.is_file_name(str(chosen.get("method", ""))):
        chosen["method"] = str(Path(chosen["method"]).absolute())  # a run may be resumed from another folder
    method = str({**values, **chosen}.get("method", "promax"))
    setting = chosen_setting({**values, **chosen}, sets)
    values = merge(values, read_preset(preset, dataset, method, setting))
    values = merge(values, {**chosen, "dataset": dataset})
    check_types(values)
    return finish(values, str(values.get("method", "promax")), sets)


def own_recipe(data: Path, given: Mapping[str, Any], sets: Sets, tasks: Any) -> dict[str, Any]:
    """The recipe of own data, made from its kind and size, overridden by the given one."""
    import warnings

    from profcil.data import own

    chosen = merge(own_values(given, sets), task_values(tasks))
    settings = build(OwnSettings, chosen, OWN, LIST_HINT)
    recipe, notes = own.recipe(data, settings)
    for note in notes:
        warnings.warn(note, DataNote, stacklevel=2)
    return merge(merge(recipe, given), {OWN: chosen})


def own_values(given: Mapping[str, Any], sets: Sets) -> dict[str, Any]:
    """The settings of own data in a recipe and in `--set`: reading the data for its recipe needs them first."""
    check_types(given)
    found = dict(given.get(OWN, {}))
    hints = typing.get_type_hints(OwnSettings)
    for key, value in pairs_of(sets):
        section, _, name = key.strip().rpartition(".")
        if section == OWN and name in hints:
            found[name] = value if isinstance(sets, Mapping) else read_text(value, hints[name])
    return found


def task_values(tasks: Any) -> dict[str, Any]:
    """What `--tasks` says: a number, `arrival`, or a file with one task a line."""
    if tasks is None:
        return {}
    if str(tasks).isdecimal() and int(tasks) > 0:
        return {"tasks": int(tasks)}
    if tasks == "arrival":
        return {"order": "arrival"}
    path = Path(str(tasks))
    if not path.is_file():
        raise ConfigError(f"--tasks {tasks} is no file; give a number of tasks, `arrival`, or a file of class names")
    from profcil.data.own.tasks import read_task_file

    return {"task_list": [list(task) for task in read_task_file(path)]}


def recorded_own_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run on own data that has begun; they are complete."""
    if "stream" not in given:
        raise ConfigError("the dataset 'own' is read from a path; give it with --data PATH")
    return dict(given)


def recorded_sites_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run on the data of sites that has begun; they are complete."""
    if "stream" not in given:
        raise ConfigError("the dataset 'sites' is read from folders of sites; give --federation, --sites and --test")
    return dict(given)


def check_types(values: Mapping[str, Any]) -> None:
    """Checks that sections are tables and that names are texts."""
    tables = {key: values.get(key, {}) for key in (*SECTIONS, "params", "methods")}
    if isinstance(tables["methods"], Mapping):
        for name, table in tables["methods"].items():
            tables[f"methods.{name}"] = table
            if isinstance(table, Mapping):
                for key in SETTINGS:
                    if key in table:
                        tables[f"methods.{name}.{key}"] = table[key]
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{key} = {table!r} is not a table; write its settings below [{key}]")
    for key in ("method", "setting"):
        if not isinstance(values.get(key, ""), str):
            raise ConfigError(f"{key} = {values[key]!r} is not text")


def finish(values: dict[str, Any], method: str, sets: Sets) -> RunConfig:
    """Checks nested values and makes the configuration. The tables of methods are under `methods`."""
    cls = registry.find("methods", method).METHOD
    choose_method(values, method, chosen_setting(values, sets))
    apply_sets(values, sets, cls.Params)
    if values.get(OWN) and values.get("dataset") != OWN:
        key = next(iter(values[OWN]))
        raise ConfigError(
            f"own.{key} is set, but the dataset is {values.get('dataset')}; give own data with --data PATH"
        )
    regime = cls.regimes.get(str(values.get("regime", "matched")), {})
    values["params"] = merge(regime, values["params"])
    stream = stream_values(values)
    check_keys(values)
    sections = {}
    for name, section in SECTIONS.items():
        if name != "stream":
            sections[name] = build(section, values.get(name, {}), name, LIST_HINT)
    sections["stream"] = build_stream(stream)
    sections["params"] = build(cls.Params, values["params"], f"method '{method}'", LIST_HINT)
    config = RunConfig(**top_level_values(values), **sections)
    if config.train.early_stop and config.evaluate == "validation":
        raise ConfigError(
            "early stopping looks at the validation part, so the run cannot be scored on it; leave out "
            "--evaluate validation or --early-stop"
        )
    return config


def chosen_setting(values: Mapping[str, Any], sets: Sets) -> str:
    """The heterogeneity setting, which `--set` may choose, too."""
    named = {key.strip(): value for key, value in pairs_of(sets)}
    return str(named.get("setting", values.get("setting", "severe")))


def choose_method(values: dict[str, Any], method: str, setting: str) -> None:
    """Moves the table of the chosen method below the given params, and drops the tables of the others."""
    tables = values.pop("methods", {})
    for name in tables:
        if name not in registry.names("methods"):
            raise unknown("method", name, registry.names("methods"))
    chosen = in_setting(tables.get(method, {}), setting)
    values["params"] = merge(chosen, values.get("params", {}))
    values["method"] = method


def stream_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values of the stream: those of the heterogeneity setting, overridden by the given ones."""
    setting = values.setdefault("setting", "severe")
    if setting not in SETTINGS:
        raise unknown("setting", str(setting), SETTINGS)
    return {**SETTINGS[setting], **values.get("stream", {})}


def check_keys(values: Mapping[str, Any]) -> None:
    known = TOP_LEVEL | {*SECTIONS, "params"}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}'; {nearest(key, known)}{LIST_HINT}")


def build_stream(values: dict[str, Any]) -> StreamSettings:
    for key in ("clients", "participants", "task_size"):
        if key not in values:
            raise ConfigError(f"stream.{key} is not set; give it in a recipe or with --set stream.{key}=N")
    return build(StreamSettings, values, "stream", LIST_HINT)


def top_level_values(values: dict[str, Any]) -> dict[str, Any]:
    kinds = {f.name: type(f.default) for f in dataclasses.fields(RunConfig)}
    found = {}
    for key, value in values.items():
        if key in TOP_LEVEL:
            found[key] = coerce(value, kinds[key], key)
    return found
