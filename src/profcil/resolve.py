"""Makes the complete, checked configuration of a run from a recipe, flags and `--set`.

The order, later entries override earlier ones: the built-in recipe of the dataset, the given recipe, the preset, the
heterogeneity setting, flags, `--set`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.config import (
    NONE,
    OWN,
    SITES,
    ChannelSettings,
    Checked,
    ClockSettings,
    ModelSettings,
    OwnSettings,
    PrivacySettings,
    RobustSettings,
    TrainSettings,
    WarmupSettings,
    build,
    coerce,
    plain,
    read_text,
)
from profcil.config import setting as field
from profcil.errors import ConfigError, DataNote, nearest, unknown
from profcil.protocol.settings import StreamSettings

RECIPES = Path(__file__).parent / "recipes"
PRESETS = RECIPES / "presets"
SETTINGS = {
    "homogeneous": {"support": 1.0, "coverage": 1.0, "disorder": 0.0},
    "severe": {"support": 0.4, "coverage": 0.5, "disorder": 0.6},
}
REGIMES = ("matched", "expanded")
LIST_HINT = " (`profcil list settings` shows all)"  # added to a message about an unknown key
IN_FULL = (f"{OWN}.", "channel.", "clock.")  # sections whose settings have no short name
SECTIONS = {
    "stream": StreamSettings,
    "train": TrainSettings,
    "warmup": WarmupSettings,
    "model": ModelSettings,
    "privacy": PrivacySettings,
    "robust": RobustSettings,
    "channel": ChannelSettings,
    "clock": ClockSettings,
    OWN: OwnSettings,
}


@dataclass(frozen=True)
class RunConfig(Checked):
    """Everything that determines a run."""

    stream: StreamSettings
    train: TrainSettings
    warmup: WarmupSettings
    model: ModelSettings
    params: Any  # the settings of the method
    dataset: str = field("digits", "dataset to learn")
    method: str = field("promax", "method to learn it with")
    setting: str = field("severe", "heterogeneity of the stream", choices=tuple(SETTINGS))
    seed: int = field(0, "seed of all random numbers", low=0)
    device: str = field("cpu", "torch device")
    threads: int = field(0, "torch threads of a step; 0 = all cores for large images, else one", low=0)
    workers: int = field(0, "clients trained in parallel on a CPU; 0 = by cores; does not change the result", low=0)
    accelerate: str = field(
        "auto",
        "auto: the fastest way on this machine; off: plain PyTorch, one client and one step after another",
        choices=("auto", "off"),
    )
    transfer: str = field("changed", "what is sent: blocks the receiver lacks, or all", choices=("changed", "full"))
    regime: str = field("matched", "budget of methods for replay and summaries of old classes", choices=REGIMES)
    evaluate: str = field("test", "part of the dataset that is scored", choices=("test", "validation"))
    keep_memories: bool = field(False, "store remembered and true class means of every position, for snapshots")
    keep_states: int = field(0, "states at the ends of positions that are kept for `profcil rollback`", low=0)
    robust: RobustSettings = dataclasses.field(default_factory=RobustSettings)
    own: OwnSettings = dataclasses.field(default_factory=OwnSettings)
    privacy: PrivacySettings = dataclasses.field(default_factory=PrivacySettings)
    channel: ChannelSettings = dataclasses.field(default_factory=ChannelSettings)
    clock: ClockSettings = dataclasses.field(default_factory=ClockSettings)


TOP_LEVEL = {f.name for f in dataclasses.fields(RunConfig)} - {*SECTIONS, "params"}


Sets = Iterable[str] | Mapping[str, Any]  # texts `key=value` of a command line, or keys and values


Recipe = str | Mapping[str, Any]  # a name, a path, or the values of a recipe


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
    if dataset == SITES:
        values = recorded_sites_run(given)
    elif dataset != OWN:
        values = merge(recipe_of(dataset), given)
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


def in_setting(table: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The table of a method for one heterogeneity setting: it may have sub-tables `severe` and `homogeneous`."""
    common = {key: value for key, value in table.items() if key not in SETTINGS}
    return merge(common, table.get(setting, {}))


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


def apply_sets(values: dict[str, Any], sets: Sets, params: type) -> None:
    """Writes `--set key=value` into the values. A key is a dotted path or its last part."""
    types = known_paths(params)
    for key, value in pairs_of(sets):
        path = find_path(key.strip(), types)
        section, _, name = path.rpartition(".")
        table = values.setdefault(section, {}) if section else values
        table[name] = value if isinstance(sets, Mapping) else read_text(value, types[path])


def pairs_of(sets: Sets) -> Iterable[tuple[str, Any]]:
    """Key and value of each `--set`."""
    if isinstance(sets, Mapping):
        return sets.items()
    return map(split, sets)


def split(item: str) -> tuple[str, str]:
    """Key and value of the text `key=value`."""
    key, sign, text = item.partition("=")
    if not sign:
        raise ConfigError(f"--set {item} has no '='; write --set key=value")
    return key, text.strip()


def known_paths(params: type) -> dict[str, Any]:
    """The dotted path of every key of `--set`, with the type of its value."""
    settable = TOP_LEVEL - {"dataset", "method"}
    paths = {f.name: type(f.default) for f in dataclasses.fields(RunConfig) if f.name in settable}
    for section, cls in {**SECTIONS, "params": params}.items():
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            paths[f"{section}.{f.name}"] = hints[f.name]
    return paths


def find_path(key: str, paths: Iterable[str]) -> str:
    """The dotted path of a key. Settings of own data, of the channel and of clocks are written in full: a method may
    have settings `text` and `transport`, too."""
    if key in paths:
        return key
    last_parts = {path: path.split(".")[-1] for path in paths if not path.startswith(IN_FULL)}
    found = [path for path, last in last_parts.items() if last == key]
    if f"train.{key}" in found:  # `rounds` alone means training, not the warm-up
        return f"train.{key}"
    if f"privacy.{key}" in found:  # `min_support` is also an older setting of a method
        return f"privacy.{key}"
    if len(found) > 1:
        raise ConfigError(f"setting '{key}' is ambiguous; write {' or '.join(sorted(found))}")
    if not found:
        names = {*paths, *last_parts.values()}
        raise ConfigError(f"unknown setting '{key}'; {nearest(key, names)}{LIST_HINT}")
    return found[0]


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


def read_preset(name: str | None, dataset: str, method: str, setting: str) -> dict[str, Any]:
    """The values of a preset for a dataset, a method and a heterogeneity setting; empty without a name.

    The settings of the method are under `params`, so that they also override a recipe that a run has written. Tables
    of a method that are named like sections of a recipe (model, train) are such sections, for this method alone.
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
        others = ", ".join(sorted(methods)) or "other datasets"
        raise ConfigError(f"the preset {name} has nothing for {method} on {dataset}, it is for {others}; leave it out")
    params = in_setting(methods.get(method, {}), setting)
    sections = {key: params.pop(key) for key in SECTIONS if key in params}
    return {**merge(values, sections), "params": params}


def preset_title(name: str) -> str:
    """What tables call a run by a preset."""
    return str(load_toml(PRESETS / f"{name}.toml")["title"])


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def recipe_names() -> list[str]:
    """The names of all recipes, built-in and of plug-ins that can be loaded."""
    broken = registry.broken_plugins("data")
    loadable = [name for name in registry.plugins("data") if name not in broken]
    from_plugins = {name for name in loadable if hasattr(registry.find("data", name), "RECIPE")}
    built_in = {path.stem for path in RECIPES.glob("*.toml")}
    return sorted(built_in | from_plugins)


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
