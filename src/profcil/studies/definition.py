"""A study: a TOML file with datasets, settings, methods, seeds and variants. Every combination, a cell, is one run.

The name of a run folder contains a hash of all settings that determine its result. So a study can be continued, two
studies share equal runs, and a changed setting is a new run. Finished runs on other data are refused. A `[smoke]`
table describes a small version of the study: its keys replace the study's keys, but its `set` is appended.

A file with the key `studies` names several studies, which are run one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.config import Checked, setting
from profcil.errors import ConfigError, unknown
from profcil.plain_values import build
from profcil.resolve import SETTINGS, RunConfig, load_toml, resolve, values_of
from profcil.runs.differences import describe_settings, differing_settings
from profcil.runs.identity import current_fingerprint, hash_settings, read_json

STUDIES = Path(__file__).parent.parent / "recipes" / "studies"
SCALES = ("paper", "short", "smoke")  # short: the first seed only
GROUPS = ("all", "replay")
Names = tuple[str, ...] | str  # method names, or one of GROUPS


@dataclass(frozen=True)
class Variant(Checked):
    """A named combination of settings for some methods."""

    name: str = ""
    methods: tuple[str, ...] | str = ()  # empty: all of the study
    datasets: tuple[str, ...] = ()  # empty: all of the study
    settings: tuple[str, ...] = ()  # empty: all of the study
    preset: str = ""
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
    settings: Mapping[str, Any] = field(default_factory=dict)  # those in which runs without a variant name differ

    @property
    def key(self) -> str:
        return hash_settings(self.config)

    @property
    def label(self) -> str:
        about = self.variant or ", ".join(describe_settings(self.settings))
        method = registry.short_name(self.config.method)
        return f"{method} ({about})" if about else method

    @property
    def name(self) -> str:
        c = self.config
        return f"{c.dataset}-{c.setting}-{registry.short_name(c.method)}-seed{c.seed}-{self.key}"


def study_names() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def load_studies(study: str | Mapping[str, Any], scale: str = "paper") -> list[Study]:
    """The study that a name, a path or the content of a file stands for, or those that it names."""
    values = study_values(study)
    if "studies" not in values:
        return [load_study(study, scale)]
    names = values["studies"]
    others = values.keys() - {"studies", "title"}
    is_list = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    if others or not is_list:
        raise ConfigError(
            f"a study with the key studies has {', '.join(sorted(values))}, allowed are a list of names of studies and "
            "a title; write the other keys into the named studies"
        )
    return [load_study(name, scale) for name in names]


def study_values(study: str | Mapping[str, Any]) -> dict[str, Any]:
    """What the file of a study holds."""
    return load_toml(find_study(study)) if isinstance(study, str) else copy.deepcopy(dict(study))


def load_study(study: str | Mapping[str, Any], scale: str = "paper") -> Study:
    """A study by built-in name, by path, or as what its file would hold; at one of its scales."""
    name = study if isinstance(study, str) else str(study.get("title", "of Python"))
    values = study_values(study)
    if "studies" in values:
        raise ConfigError(f"study {name} names other studies; it is run with `profcil study`")
    smoke = values.pop("smoke", None)
    if not isinstance(smoke, dict | None):
        raise ConfigError(f"study {name} has smoke = {smoke!r}, which is not a table; write its settings below [smoke]")
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if scale == "smoke":
        if smoke is None:
            raise ConfigError(f"study {name} has no [smoke] table; leave --scale out, or add one to its TOML file")
        values |= smoke | {"set": [*values.get("set", []), *smoke.get("set", [])]}
    built: Study = build(Study, values | {"scale": scale}, "the study")
    for key in ("datasets", "settings", "methods", "seeds", "variants"):
        if not getattr(built, key):
            raise ConfigError(f"study {name} has no {key}; give at least one, or leave the key out")
    if "methods" in values:
        check_variants_run_methods(built, name)
    return replace(built, seeds=built.seeds[:1]) if scale == "short" else built


def check_variants_run_methods(study: Study, name: str) -> None:
    """Refuses a study that names a method which none of its variants runs."""
    run: set[str] = set()
    for variant in study.variants:
        run |= {*expand_methods(variant.get("methods") or study.methods)}
    dropped = [method for method in expand_methods(study.methods) if method not in run]
    if dropped:
        raise ConfigError(
            f"study {name} names the method {dropped[0]}, but every variant has methods of its own without it; add it "
            "to a variant, add a variant without methods, or take it out of the study"
        )


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
    return with_differences(list(cells.values()))


def list_all_cells(studies: Iterable[Study]) -> list[Cell]:
    """Every run of several studies, in their order. A run of two studies is listed with the first."""
    cells: dict[str, Cell] = {}
    for study in studies:
        for cell in list_cells(study):
            cells.setdefault(f"{cell.name} {cell.variant}", cell)
    return list(cells.values())


def with_differences(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, each with the settings in which cells of its dataset, setting, method and variant name differ."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, cell in enumerate(cells):
        c = cell.config
        groups.setdefault((c.dataset, c.setting, c.method, cell.variant), []).append(number)
    found: dict[int, dict[str, Any]] = {}
    for numbers in groups.values():
        differing = differing_settings([values_of(cells[number].config) for number in numbers])
        found |= dict(zip(numbers, differing, strict=True))
    return [replace(cell, settings=found[number]) for number, cell in enumerate(cells)]


def variant_cells(study: Study, variant: Variant, dataset: str, heterogeneity: str) -> Iterator[Cell]:
    """The runs of one variant on one dataset: every method with every seed."""
    for method in expand_methods(variant.methods or study.methods):
        preset = variant.preset or None
        flags = {"dataset": dataset, "setting": heterogeneity, "method": method, "preset": preset}
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


def is_finished(out: Path, cell: Cell) -> bool:
    return bool(read_json(out / cell.name / "run.json").get("done"))


def check_data(cells: Iterable[Cell], out: Path, data_dir: Path) -> None:
    """Refuses to reuse finished runs if the data is not the data they were trained on.

    One seed of each dataset is loaded for the comparison. Missing data cannot be compared and is accepted.
    """
    recorded: dict[str, dict[int, set[str]]] = {}
    first: dict[str, RunConfig] = {}
    for cell in cells:
        facts = read_json(out / cell.name / "run.json")
        if facts.get("done"):
            first.setdefault(cell.config.dataset, cell.config)
            by_seed = recorded.setdefault(cell.config.dataset, {})
            by_seed.setdefault(cell.config.seed, set()).add(facts["data"])
    for dataset, by_seed in recorded.items():
        current = current_fingerprint(first[dataset], data_dir)
        changed = current is not None and by_seed[first[dataset].seed] != {current}
        if changed or any(len(fingerprints) > 1 for fingerprints in by_seed.values()):
            raise ConfigError(
                f"finished runs on {dataset} in {out} were made from other data than is under {data_dir} now; "
                f"give the data they were made from, or another --out"
            )
