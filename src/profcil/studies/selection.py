"""Select a study by name and narrow it to some seeds, methods or datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from profcil import registry
from profcil.errors import ConfigError, unknown
from profcil.studies.definition import Study, expand_methods, load_studies


def select_studies(
    study: str | Mapping[str, Any],
    scale: str,
    seeds: Iterable[int] | None,
    methods: Iterable[str] | None,
    datasets: Iterable[str] | None,
    sets: Iterable[str],
) -> list[Study]:
    """The study, or the several that it names, with other seeds, methods, datasets or settings.

    Of several studies each keeps those of its methods and datasets that are asked for; one without any is left out.
    """
    methods = None if methods is None else list(methods)
    datasets = None if datasets is None else list(datasets)
    studies = load_studies(study, scale)
    if len(studies) == 1:
        return [narrow_study(studies[0], seeds, methods, datasets, sets)]
    for name in methods or ():
        if name not in registry.names("methods"):
            raise unknown("method", name, registry.names("methods"))
    kept = []
    for one in studies:
        own_methods = None if methods is None else [name for name in methods if name in offered_methods(one)]
        own_datasets = None if datasets is None else [name for name in datasets if name in one.datasets]
        if own_methods != [] and own_datasets != []:
            kept.append(narrow_study(one, seeds, own_methods, own_datasets, sets))
    if not kept:
        asked = ", ".join([*(methods or ()), *(datasets or ())])
        raise ConfigError(f"none of the studies has {asked}; name methods and datasets that one of them has")
    return kept


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
    offered = offered_methods(study)
    for name in methods:
        if name not in registry.names("methods"):
            raise unknown("method", name, registry.names("methods"))
        if name not in offered:
            raise ConfigError(
                f"method '{name}' is not in the study; choose among its methods: {', '.join(sorted(offered))}"
            )


def offered_methods(study: Study) -> set[str]:
    """The methods that some variant of a study runs."""
    offered: set[str] = set()
    for variant in study.variants:
        offered |= {*expand_methods(variant.get("methods") or study.methods)}
    return offered
