"""Select a study by name and narrow it to some seeds, methods or datasets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from profcil import registry
from profcil.errors import ConfigError, unknown
from profcil.studies.definition import Study, expand_methods, load_study


def select_study(
    name: str, scale: str, seeds: str | None, methods: str | None, datasets: str | None, sets: Iterable[str]
) -> Study:
    """The study that command-line flags describe. Seeds, methods and datasets are comma-separated texts."""
    study = load_study(name, scale)
    return narrow_study(study, parse_seeds(seeds), split_names(methods), split_names(datasets), sets)


def parse_seeds(text: str | None) -> list[int] | None:
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds is '{text}', allowed are whole numbers and commas; write --seeds 0,1") from None


def split_names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


def narrow_study(
    study: Study,
    seeds: Iterable[int] | None = None,
    methods: Iterable[str] | None = None,
    datasets: Iterable[str] | None = None,
    sets: Iterable[str] = (),
) -> Study:
    """A copy of the study with other seeds or datasets, a subset of its methods, or further settings.

    None keeps what the study has.
    """
    methods = None if methods is None else tuple(methods)
    if methods:
        check_methods(study, methods)
    variants = []
    for raw in study.variants:
        variant = dict(raw)
        variant["set"] = [*variant.get("set", ()), *sets]
        if methods is not None:
            offered = expand_methods(variant.get("methods") or study.methods)
            variant["methods"] = [method for method in offered if method in methods]
        if methods is None or variant["methods"]:
            variants.append(variant)
    return replace(
        study,
        seeds=tuple(seeds or study.seeds),
        datasets=tuple(datasets or study.datasets),
        variants=tuple(variants),
    )


def check_methods(study: Study, methods: Sequence[str]) -> None:
    """Refuses a method that does not exist or is not in the study."""
    offered: set[str] = set()
    for variant in study.variants:
        offered |= {*expand_methods(variant.get("methods") or study.methods)}
    for name in methods:
        if name not in registry.names("methods"):
            raise unknown("method", name, registry.names("methods"))
        if name not in offered:
            raise ConfigError(
                f"method '{name}' is not in the study; choose among its methods: {', '.join(sorted(offered))}"
            )
