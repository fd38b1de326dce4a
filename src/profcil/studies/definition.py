"""A study: a TOML file with datasets, settings, methods, seeds and variants. Every combination, a cell, is one run.

The name of a run folder contains a hash of all settings that determine its result. So a study can be continued, two
studies share equal runs, and a changed setting is a new run. Finished runs on other data are refused. A `[smoke]`
table describes a small version of the study: its keys replace the study's keys, but its `set` is appended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from profcil import __version__, registry
from profcil.config import Checked, build, setting
from profcil.errors import ConfigError, DataError, unknown
from profcil.resolve import SETTINGS, RunConfig, load_toml, plugin_origins, resolve, values_of

STUDIES = Path(__file__).parent.parent / "recipes" / "studies"
# Settings without effect on a result, beyond rounding. `regime` only changes settings of the method, which count.
WITHOUT_EFFECT = ("threads", "workers", "accelerate", "regime")
SCALES = ("paper", "smoke")
GROUPS = ("all", "replay")
Names = tuple[str, ...] | str  # method names, or one of GROUPS


@dataclass(frozen=True)
class Variant(Checked):
    """A named combination of settings for some methods."""

    name: str = ""
    methods: tuple[str, ...] | str = ()  # empty: all of the study
    datasets: tuple[str, ...] = ()  # empty: all of the study
    settings: tuple[str, ...] = ()  # empty: all of the study
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study(Checked):
    """The content of a study's TOML file."""

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
    applicable: bool = True  # whether the method supports the modality of the dataset

    @property
    def key(self) -> str:
        return hash_settings(self.config)

    @property
    def label(self) -> str:
        return f"{self.config.method} ({self.variant})" if self.variant else self.config.method

    @property
    def name(self) -> str:
        c = self.config
        return f"{c.dataset}-{c.setting}-{c.method}-seed{c.seed}-{self.key}"


def hash_settings(config: RunConfig, exclude: Sequence[str] = WITHOUT_EFFECT) -> str:
    """A hash of everything except the data that determines a result.

    The kind of device counts, because a GPU draws other random numbers than a CPU; the index of the GPU does not. For
    plug-ins, version and source count too.
    """
    facts = {key: value for key, value in values_of(config).items() if key not in (*exclude, "device")}
    facts["version"] = __version__
    device_kind = config.device.partition(":")[0]
    if "device" not in exclude and device_kind != "cpu":
        facts["device"] = device_kind
    origins = plugin_origins(config)
    if origins:
        facts["brought"] = origins
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def study_names() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def load_study(name: str, scale: str = "paper") -> Study:
    """A study by built-in name or by path, at one of its scales."""
    values = load_toml(find_study(name))
    smoke = values.pop("smoke", None)
    if not isinstance(smoke, dict | None):
        raise ConfigError(f"study {name} has smoke = {smoke!r}, which is not a table; write its settings below [smoke]")
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if scale == "smoke":
        if smoke is None:
            raise ConfigError(f"study {name} has no [smoke] table; leave --scale out, or add one to its TOML file")
        values |= smoke | {"set": [*values.get("set", []), *smoke.get("set", [])]}
    study = build(Study, values | {"scale": scale}, "the study")
    for key in ("datasets", "settings", "methods", "seeds", "variants"):
        if not getattr(study, key):
            raise ConfigError(f"study {name} has no {key}; give at least one, or leave the key out")
    return study


def find_study(name: str) -> Path:
    """The TOML file of a study, by built-in name or by path."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    if name not in study_names():
        raise unknown("study", name, study_names())
    return STUDIES / f"{name}.toml"


def expand_methods(names: Names) -> tuple[str, ...]:
    """Method names. `all` stands for every usable method, `replay` for those that can show their replay samples."""
    if not isinstance(names, str):
        return names
    if names not in GROUPS:
        raise unknown("group of methods", names, GROUPS)
    for name in sorted(registry.builtin("methods") & registry.plugins("methods").keys()):
        registry.find("methods", name)  # raises: a plug-in hides a built-in method, so the group would be incomplete
    usable = registry.usable("methods").items()
    return tuple(name for name, module in usable if names == "all" or has_replay(module.METHOD))


def has_replay(method: type) -> bool:
    from profcil.methods.base import Method

    return method.replay is not Method.replay  # type: ignore[attr-defined]


def list_cells(study: Study) -> list[Cell]:
    """Every run of a study, in the order of its keys; equal runs of one variant name are listed once."""
    cells: dict[str, Cell] = {}
    for raw, dataset, heterogeneity in product(study.variants, study.datasets, study.settings):
        variant = build(Variant, raw, "a variant")
        check_names(variant)
        in_datasets = dataset in (variant.datasets or study.datasets)
        in_settings = heterogeneity in (variant.settings or study.settings)
        if in_datasets and in_settings:
            for cell in variant_cells(study, variant, dataset, heterogeneity):
                cells.setdefault(f"{cell.name} {cell.variant}", cell)
    return list(cells.values())


def variant_cells(study: Study, variant: Variant, dataset: str, heterogeneity: str) -> Iterator[Cell]:
    """The runs of one variant on one dataset: every method with every seed."""
    for method in expand_methods(variant.methods or study.methods):
        flags = {"dataset": dataset, "setting": heterogeneity, "method": method}
        config = resolve(None, flags, [*study.set, *variant.set])
        applicable = supports_modality(method, dataset)
        for seed in study.seeds:
            yield Cell(replace(config, seed=seed), variant.name, applicable)


def check_names(variant: Variant) -> None:
    """Refuses unknown datasets, settings and methods in a variant."""
    check_known("dataset", variant.datasets, registry.names("data"))
    check_known("setting", variant.settings, SETTINGS)
    check_known("method", expand_methods(variant.methods), registry.names("methods"))


def check_known(kind: str, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise unknown(kind, name, known)


def supports_modality(method: str, dataset: str) -> bool:
    """Whether a method supports the modality of a dataset. Other conflicts show when the cell is run."""
    modality = registry.find("data", dataset).FACTS.modality
    return modality in registry.find("methods", method).METHOD.modalities


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged or holds something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_finished(out: Path, cell: Cell) -> bool:
    return bool(read_json(out / cell.name / "run.json").get("done"))


def check_data(cells: Iterable[Cell], out: Path, data_dir: Path) -> None:
    """Refuses to reuse finished runs if the data is not the data they were trained on.

    One seed of each dataset is loaded for the comparison. Missing data cannot be compared and is accepted.
    """
    recorded: dict[str, dict[int, set[str]]] = {}
    for cell in cells:
        facts = read_json(out / cell.name / "run.json")
        if facts.get("done"):
            by_seed = recorded.setdefault(cell.config.dataset, {})
            by_seed.setdefault(cell.config.seed, set()).add(facts["data"])
    for dataset, by_seed in recorded.items():
        seed = next(iter(by_seed))
        current = current_fingerprint(dataset, data_dir, seed)
        changed = current is not None and by_seed[seed] != {current}
        if changed or any(len(fingerprints) > 1 for fingerprints in by_seed.values()):
            raise ConfigError(
                f"finished runs on {dataset} in {out} were made from other data than is under {data_dir} now; "
                f"give the data they were made from, or another --out"
            )


def current_fingerprint(dataset: str, data_dir: Path, seed: int) -> str | None:
    """The fingerprint of a dataset as it is now; None if it cannot be loaded."""
    from profcil.data.loading import load_bundle

    try:
        return load_bundle(dataset, data_dir, seed).fingerprint
    except DataError:
        return None
