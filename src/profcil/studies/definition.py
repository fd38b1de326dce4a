"""A study: one TOML of datasets, settings, methods, seeds and variants; every cell one run, kept and reused.

A run's folder is named by a hash of all settings that determine its result, so a study continues where it was, two
studies share runs, and a changed setting is a new run; finished runs of other data are refused. A `[smoke]` table
makes a study small: its keys replace the study's, except that its `set` is added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from profcil import __version__, registry
from profcil.config import Checked, build, plain, setting
from profcil.errors import ConfigError, DataError, unknown
from profcil.resolve import SETTINGS, RunConfig, load_toml, resolve

STUDIES = Path(__file__).parent.parent / "recipes" / "studies"
# What no result depends on, beyond rounding; what a regime changes is in the method's own settings.
FREE = ("threads", "workers", "accelerate", "regime")
SCALES = ("paper", "smoke")
GROUPS = ("all", "replay")
Names = tuple[str, ...] | str  # method names, or one of GROUPS


@dataclass(frozen=True)
class Variant(Checked):
    """A named way to set some methods up."""

    name: str = ""
    methods: tuple[str, ...] | str = ()  # empty: all of the study's
    datasets: tuple[str, ...] = ()  # empty: all of the study's
    settings: tuple[str, ...] = ()  # empty: all of the study's
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study(Checked):
    """The cells of a study."""

    title: str = ""
    datasets: tuple[str, ...] = ("digits",)
    settings: tuple[str, ...] = ("severe",)
    methods: tuple[str, ...] | str = ("fedavg", "fedprox", "pro", "promax")
    seeds: tuple[int, ...] = (0,)
    set: tuple[str, ...] = ()
    diagnose: bool = False
    variants: tuple[dict, ...] = field(default=({},))
    scale: str = setting("paper", "how large the study is", choices=SCALES)


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    config: RunConfig
    variant: str
    applicable: bool = True  # whether the method is made for the dataset's modality

    @property
    def key(self) -> str:
        return key_of(self.config)

    @property
    def label(self) -> str:
        return f"{self.config.method} ({self.variant})" if self.variant else self.config.method

    @property
    def name(self) -> str:
        c = self.config
        return f"{c.dataset}-{c.setting}-{c.method}-seed{c.seed}-{self.key}"


def key_of(config: RunConfig, but: Sequence[str] = FREE) -> str:
    """A hash of everything that determines a result but the data. Which GPU computes it does not matter; that it is one
    does, because it draws other numbers. Of what other packages bring, version and source count."""
    facts = {k: v for k, v in plain(config).items() if k not in (*but, "device")} | {"version": __version__}
    if "device" not in but and (kind := config.device.partition(":")[0]) != "cpu":
        facts["device"] = kind
    if brought := {room: origin for room, name in parts_of(config).items() if (origin := registry.origin(room, name))}:
        facts["brought"] = brought
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def parts_of(config: RunConfig) -> dict[str, str]:
    """The names of a run's method, dataset and encoder; empty where the encoder is one of profcil's own anyway."""
    encoder = config.model.encoder
    if not encoder and config.dataset in registry.guests("data"):
        encoder = registry.find("data", config.dataset).FACTS.encoder
    return {"methods": config.method, "data": config.dataset, "encoders": encoder}


def study_names() -> list[str]:
    return sorted(p.stem for p in STUDIES.glob("*.toml"))


def load_study(name: str, scale: str = "paper") -> Study:
    """A study by built-in name or by path, at one of its scales."""
    path = Path(name)
    if path.suffix != ".toml":
        if name not in study_names():
            raise unknown("study", name, study_names())
        path = STUDIES / f"{name}.toml"
    values = load_toml(path)
    small = values.pop("smoke", None)
    if not isinstance(small, dict | None):
        raise ConfigError(f"study {name} has smoke = {small!r}, which is not a table; write its settings below [smoke]")
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if scale == "smoke":
        if small is None:
            raise ConfigError(f"study {name} has no [smoke] table; leave --scale out, or write one into its TOML")
        values |= small | {"set": [*values.get("set", []), *small.get("set", [])]}
    study = build(Study, values | {"scale": scale}, "the study")
    for key in ("datasets", "settings", "methods", "seeds", "variants"):
        if not getattr(study, key):
            raise ConfigError(f"study {name} has no {key}; give it at least one, or leave the key out")
    return study


def expand(names: Names) -> tuple[str, ...]:
    """Method names; `all` is every method that can be used, `replay` those that can show what they replay."""
    if not isinstance(names, str):
        return names
    if names not in GROUPS:
        raise unknown("group of methods", names, GROUPS)
    for name in sorted(registry.own("methods") & registry.guests("methods").keys()):
        registry.find("methods", name)  # refused: the group would lack one of profcil's own
    found = registry.usable("methods").items()
    return tuple(name for name, module in found if names == "all" or replays(module.METHOD))


def replays(method: type) -> bool:
    from profcil.methods.base import Method

    return method.replay is not Method.replay  # type: ignore[attr-defined]


def cells(study: Study) -> list[Cell]:
    """Every run of a study, in the order of its axes; the same run under two names is one cell."""
    out: dict[str, Cell] = {}
    for raw, dataset, het in product(study.variants, study.datasets, study.settings):
        variant = build(Variant, raw, "a variant")
        check_names(variant)
        if dataset not in (variant.datasets or study.datasets) or het not in (variant.settings or study.settings):
            continue
        for method in expand(variant.methods or study.methods):
            flags = {"dataset": dataset, "setting": het, "method": method}
            config, fit = resolve(None, flags, [*study.set, *variant.set]), fits(method, dataset)
            for seed in study.seeds:
                cell = Cell(replace(config, seed=seed), variant.name, fit)
                out.setdefault(f"{cell.name} {cell.variant}", cell)
    return list(out.values())


def check_names(variant: Variant) -> None:
    """What a variant is for is something that there is."""
    for what, given, known in (
        ("dataset", variant.datasets, registry.names("data")),
        ("setting", variant.settings, SETTINGS),
        ("method", expand(variant.methods), registry.names("methods")),
    ):
        for name in given:
            if name not in known:
                raise unknown(what, name, known)


def fits(method: str, dataset: str) -> bool:
    """Whether a method is made for a dataset's modality; whatever else may not fit shows when it is run."""
    return registry.find("data", dataset).FACTS.modality in registry.find("methods", method).METHOD.modalities


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where it is not there or not a table."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_data(todo: Iterable[Cell], out: Path, data_dir: Path) -> None:
    """Finished runs can be reused only with the data they were made from. Of each dataset one seed is loaded for that;
    where the data is not there any more, nobody can tell."""
    from profcil.data.loading import load_bundle

    known: dict[tuple[str, int], set[str]] = {}
    for cell in todo:
        if (facts := read_json(out / cell.name / "run.json")).get("done"):
            known.setdefault((cell.config.dataset, cell.config.seed), set()).add(facts["data"])
    for dataset, seed in {dataset: seed for dataset, seed in reversed(known)}.items():
        made = {s: prints for (name, s), prints in known.items() if name == dataset}
        try:
            here = {load_bundle(dataset, data_dir, seed).fingerprint}
        except DataError:
            here = made[seed]
        if made[seed] != here or any(len(prints) > 1 for prints in made.values()):
            raise ConfigError(
                f"finished runs on {dataset} in {out} were made from other data than lies under {data_dir} now; "
                f"give the data they were made from, or another --out"
            )


def finished(out: Path, cell: Cell) -> bool:
    return bool(read_json(out / cell.name / "run.json").get("done"))
