"""From a recipe and flags to one complete, checked configuration of a run.

Later wins: the dataset's built-in recipe, the given recipe file, a preset, the heterogeneity setting, flags, `--set`.
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
from profcil.config import NONE, Checked, ModelSettings, TrainSettings, WarmupSettings, build, coerce, plain, read_text
from profcil.config import setting as knob
from profcil.errors import ConfigError, nearest, unknown
from profcil.protocol.settings import StreamSettings

RECIPES = Path(__file__).parent / "recipes"
PRESETS = RECIPES / "presets"
SETTINGS = {
    "homogeneous": {"support": 1.0, "coverage": 1.0, "disorder": 0.0},
    "severe": {"support": 0.4, "coverage": 0.5, "disorder": 0.6},
}
REGIMES = ("matched", "expanded")
SHOWN = " (`profcil list settings` shows all)"  # where a key is unknown
SECTIONS = {"stream": StreamSettings, "train": TrainSettings, "warmup": WarmupSettings, "model": ModelSettings}


@dataclass(frozen=True)
class RunConfig(Checked):
    """Everything that determines a run."""

    stream: StreamSettings
    train: TrainSettings
    warmup: WarmupSettings
    model: ModelSettings
    params: Any  # the method's own settings
    dataset: str = knob("digits", "dataset to learn")
    method: str = knob("promax", "method to learn it with")
    setting: str = knob("severe", "heterogeneity of the stream", choices=tuple(SETTINGS))
    seed: int = knob(0, "seed of everything random", low=0)
    device: str = knob("cpu", "torch device")
    threads: int = knob(0, "torch threads within a step; 0 = all cores for large images, else one", low=0)
    workers: int = knob(0, "clients computed at once on a CPU; 0 = by cores; never changes a result", low=0)
    accelerate: str = knob(
        "auto",
        "auto: the fastest way on this machine; off: plain PyTorch, one client and one step after another",
        choices=("auto", "off"),
    )
    transfer: str = knob("changed", "what travels: what the receiver lacks, or everything", choices=("changed", "full"))
    regime: str = knob("matched", "what methods may replay and summarise of old classes", choices=REGIMES)
    evaluate: str = knob("test", "which part is scored", choices=("test", "validation"))
    keep_memories: bool = knob(False, "keep remembered and true class means of every position, for snapshots")


TOP = {f.name for f in dataclasses.fields(RunConfig)} - {*SECTIONS, "params"}


Sets = Iterable[str] | Mapping[str, Any]  # `key=value` texts of a command line, or keys and values


def resolve(recipe: str | None = None, flags: Mapping[str, Any] | None = None, sets: Sets = ()) -> RunConfig:
    """The configuration behind a command line, or behind a call. The flag `preset` names a preset."""
    chosen = {k: v for k, v in (flags or {}).items() if v is not None}
    preset = chosen.pop("preset", None)
    given = read_recipe(recipe, chosen)
    dataset = {"dataset": "digits", **given, **chosen}["dataset"]
    if not isinstance(dataset, str) or dataset not in registry.names("data"):
        raise unknown("dataset", str(dataset), registry.names("data"))
    values = merge(recipe_of(dataset), given)
    method = str({**values, **chosen}.get("method", "promax"))
    values = merge(values, read_preset(preset, dataset, method))
    values = merge(values, {**chosen, "dataset": dataset})
    check_shape(values)
    return finish(values, str(values.get("method", "promax")), sets)


def check_shape(values: Mapping[str, Any]) -> None:
    """What is a table in every recipe is one here, and names are texts."""
    methods = values.get("methods", {})
    tables = {**{key: values.get(key, {}) for key in (*SECTIONS, "params")}, "methods": methods}
    tables |= {f"methods.{name}": table for name, table in methods.items()} if isinstance(methods, Mapping) else {}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{key} = {table!r} is not a table; write its settings below [{key}]")
    for key in ("method", "setting"):
        if not isinstance(values.get(key, ""), str):
            raise ConfigError(f"{key} = {values[key]!r} is not text")


def finish(values: dict[str, Any], method: str, sets: Sets) -> RunConfig:
    """Checks and builds; `values` is one nested table, with method tables under `methods`."""
    cls = registry.find("methods", method).METHOD
    tables = values.pop("methods", {})
    for name in tables:
        if name not in registry.names("methods"):
            raise unknown("method", name, registry.names("methods"))
    values["params"] = merge(tables.get(method, {}), values.get("params", {}))
    values["method"] = method
    apply_sets(values, sets, cls.Params)
    values["params"] = merge(cls.regimes.get(str(values.get("regime", "matched")), {}), values["params"])
    name = values.setdefault("setting", "severe")
    if name not in SETTINGS:
        raise unknown("setting", str(name), SETTINGS)
    stream = {**SETTINGS[name], **values.get("stream", {})}
    for key in values:
        if key not in TOP | {*SECTIONS, "params"}:
            raise ConfigError(f"unknown setting '{key}'; {nearest(key, TOP | {*SECTIONS, 'params'})}{SHOWN}")
    built = {s: build(c, values.get(s, {}), s, SHOWN) for s, c in SECTIONS.items() if s != "stream"}
    for key in ("clients", "participants", "task_size"):
        if key not in stream:
            raise ConfigError(f"stream.{key} is not set; give it in a recipe or with --set stream.{key}=N")
    built["stream"] = build(StreamSettings, stream, "stream", SHOWN)
    built["params"] = build(cls.Params, values["params"], f"method '{method}'", SHOWN)
    top = {k: v for k, v in values.items() if k in TOP}
    return RunConfig(**_checked_top(top), **built)


def apply_sets(values: dict[str, Any], sets: Sets, params: type) -> None:
    """`--set key=value`, by dotted path or by its last part."""
    paths = known_paths(params)
    for key, value in sets.items() if isinstance(sets, Mapping) else map(split, sets):
        path = find_path(key.strip(), paths)
        table = values if "." not in path else values.setdefault(path.split(".")[0], {})
        table[path.split(".")[-1]] = value if isinstance(sets, Mapping) else read_text(value, paths[path])


def split(item: str) -> tuple[str, str]:
    key, sign, text = item.partition("=")
    if not sign:
        raise ConfigError(f"--set {item} has no '='; write --set key=value")
    return key, text.strip()


def known_paths(params: type) -> dict[str, Any]:
    """Every key of `--set` by its dotted path, and the type of what it holds."""
    top = {f.name: type(f.default) for f in dataclasses.fields(RunConfig) if f.name in TOP - {"dataset", "method"}}
    sections = {**SECTIONS, "params": params}
    hints = {s: typing.get_type_hints(c) for s, c in sections.items()}
    return top | {f"{s}.{f.name}": hints[s][f.name] for s, c in sections.items() for f in dataclasses.fields(c)}


def find_path(key: str, paths: Iterable[str]) -> str:
    if key in paths:
        return key
    found = [p for p in paths if p.split(".")[-1] == key]
    if f"train.{key}" in found:  # `rounds` alone means the stream's, not the warm-up's
        return f"train.{key}"
    if len(found) > 1:
        raise ConfigError(f"setting '{key}' is ambiguous; write {' or '.join(sorted(found))}")
    if not found:
        names = {*paths, *(p.split(".")[-1] for p in paths)}
        raise ConfigError(f"unknown setting '{key}'; {nearest(key, names)}{SHOWN}")
    return found[0]


def read_recipe(recipe: str | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """A recipe by path or by built-in name; `NAME-severe` and `NAME-homogeneous` choose the setting too."""
    if recipe is None:
        return {}
    path = Path(recipe)
    if path.suffix == ".toml" or path.is_file():
        return load_toml(path)
    name, _, ending = recipe.rpartition("-")
    if ending in SETTINGS and name in recipe_names():
        chosen.setdefault("setting", ending)
        return recipe_of(name)
    if recipe in recipe_names():
        return recipe_of(recipe)
    raise unknown("recipe", recipe, [*recipe_names(), *(f"{n}-{s}" for n in recipe_names() for s in SETTINGS)])


def recipe_of(dataset: str) -> dict[str, Any]:
    """A dataset's recipe: the file of its name, or for one of another package the module's own `RECIPE`."""
    path = RECIPES / f"{dataset}.toml"
    if path.exists():
        return load_toml(path)
    return {"dataset": dataset, **copy.deepcopy(getattr(registry.find("data", dataset), "RECIPE", {}))}


def read_preset(name: str | None, dataset: str, method: str) -> dict[str, Any]:
    """What a preset sets for a dataset and a method; nothing without a name. The method's settings come as `params`, so
    that they also replace those of a recipe that a run has written."""
    if name is None:
        return {}
    if name not in preset_names():
        raise unknown("preset", str(name), preset_names())
    values = load_toml(PRESETS / f"{name}.toml")
    datasets = values.pop("datasets", {})
    values = merge(values, datasets.get(dataset, {}))
    methods = values.pop("methods", {})
    return {**values, "params": methods.get(method, {})}


def preset_names() -> list[str]:
    return sorted(p.stem for p in PRESETS.glob("*.toml"))


def recipe_names() -> list[str]:
    broken = registry.broken_plugins("data")
    loadable = [name for name in registry.plugins("data") if name not in broken]
    from_plugins = {name for name in loadable if hasattr(registry.find("data", name), "RECIPE")}
    return sorted(from_plugins | {path.stem for path in RECIPES.glob("*.toml")})


def load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; `profcil list recipes` names the built-in ones") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"recipe {path} cannot be read as TOML: {error}") from None


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key, the second on top."""
    out = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if both else value
    return out


def to_toml(config: RunConfig) -> str:
    """The configuration as a recipe that gives it back. What is None by default, and by the regime, is left out."""
    values = plain(config)
    regime = registry.find("methods", config.method).METHOD.regimes.get(config.regime, {})
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    lines = [f"{k} = {toml_value(v)}" for k, v in values.items() if k not in tables]
    for name, table in tables.items():
        empty = {f.name for f in dataclasses.fields(getattr(config, name)) if f.default is None}
        kept = {k: v for k, v in table.items() if v is not None or k not in empty or k in regime}
        lines += ["", f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in kept.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # `inf` too
    return json.dumps(NONE if value is None else value, ensure_ascii=False)


def _checked_top(top: dict[str, Any]) -> dict[str, Any]:
    kinds = {f.name: type(f.default) for f in dataclasses.fields(RunConfig) if f.name in TOP}
    return {k: coerce(v, kinds[k], k) for k, v in top.items()}
