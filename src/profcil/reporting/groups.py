"""Runs that differ only in the seed as one group, with the name that tables, figures and the page show.

The name is the method as people write it and, where runs of one method on one stream differ in settings, all settings
in which they differ: `PRO-MAX (noise=0.1)`. Settings that are equal, or that change no result, are not named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from profcil.reporting.paper import method_rank, method_title
from profcil.reporting.presets import PRESET, named_differences
from profcil.resolve import preset_title
from profcil.runs.differences import describe_settings
from profcil.runs.gather import HasSettings, finished_runs, load_runs, settings_without_seed, stream_name
from profcil.runs.reader import Run


@dataclass(frozen=True)
class Group:
    """Finished runs of one method that differ only in the seed."""

    stream: str  # dataset and setting: what one panel of a figure shows
    method: str
    settings: dict[str, Any]  # those that distinguish the group from other runs of the method on the same stream
    variant: int  # the number of the group among those of its method on its stream, from 0
    runs: tuple[Run, ...]

    @cached_property
    def label(self) -> str:
        """The name of the group among those of its stream."""
        return label_of(self.method, self.settings)


def label_of(method: str, settings: Mapping[str, Any]) -> str:
    """The method as people write it, and settings that distinguish it."""
    title, texts = name_parts(method, settings)
    return f"{title} ({', '.join(texts)})" if texts else title


def name_parts(method: str, settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The method as people write it, and each setting that distinguishes it. A preset may have a name of its own
    (PRO-MAX+)."""
    title = method_title(method)
    if PRESET not in settings:
        return title, describe_settings(settings)
    preset = preset_title(settings[PRESET])
    texts = describe_settings({key: value for key, value in settings.items() if key != PRESET})
    return (preset, texts) if title in preset else (title, [preset, *texts])


def load_groups(paths: Sequence[str | Path], warn: Callable[[str], None], with_scores: bool = True) -> list[Group]:
    """The groups of the finished runs among `paths`, in a fixed order.

    `with_scores` leaves out rows of a store that have no scores by task, with a warning.
    """
    runs = load_runs(paths, warn, with_scores)
    return group_runs(finished_runs(runs, warn))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs that differ only in seed and machine, in a fixed order: by stream, then as the paper's tables.

    If a seed occurs twice in a group, the first run counts.
    """
    by_settings: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_seed = by_settings.setdefault(settings_without_seed(run), {})
        by_seed.setdefault(run.config["seed"], run)
    by_method: dict[tuple[str, str], list[tuple[Run, ...]]] = {}
    for by_seed in by_settings.values():
        own = tuple(by_seed[seed] for seed in sorted(by_seed))
        by_method.setdefault(method_on_stream(own[0]), []).append(own)
    groups: list[Group] = []
    for (stream, method), variants in by_method.items():
        groups += variant_groups(stream, method, variants)
    datasets = list(dict.fromkeys(run.config["dataset"] for run in runs))

    def order(group: Group) -> tuple[Any, ...]:
        return stream_rank(group, datasets), method_rank(group.method), group.variant

    return sorted(groups, key=order)


def method_on_stream(run: HasSettings) -> tuple[str, str]:
    return stream_name(run), run.config["method"]


def variant_groups(stream: str, method: str, variants: Sequence[tuple[Run, ...]]) -> list[Group]:
    """The groups of one method on one stream, ordered by the settings in which they differ."""
    differing = named_differences([own[0].config for own in variants])
    pairs = list(zip(differing, variants, strict=True))
    pairs.sort(key=lambda pair: value_order(pair[0]))
    first = 1 if PRESET in pairs[0][0] else 0  # looks the same whether the plain method is beside it or not
    return [Group(stream, method, settings, number, own) for number, (settings, own) in enumerate(pairs, first)]


def value_order(settings: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """A sort key: numbers by size, anything else as text."""
    key = []
    for name, value in settings.items():
        if isinstance(value, int | float):
            key.append((name, float(value), ""))
        else:
            key.append((name, 0.0, str(value)))
    return key


def stream_rank(group: Group, datasets: Sequence[str]) -> tuple[int, int, str]:
    """A sort key: datasets in the order of their first runs, then severe, homogeneous and other settings."""
    config = group.runs[0].config
    known = ("severe", "homogeneous")
    setting = config["setting"]
    rank = known.index(setting) if setting in known else len(known)
    return datasets.index(config["dataset"]), rank, group.stream


def run_labels(runs: Sequence[HasSettings]) -> list[str]:
    """The label of each run, finished or not, among all of them."""
    settings = distinguishing_settings(runs)
    return [label_of(run.config["method"], own) for run, own in zip(runs, settings, strict=True)]


def distinguishing_settings(runs: Sequence[HasSettings]) -> list[dict[str, Any]]:
    """For each run the settings in which the runs of its method on its stream differ."""
    by_method: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        by_method.setdefault(method_on_stream(run), []).append(number)
    settings: dict[int, dict[str, Any]] = {}
    for numbers in by_method.values():
        differing = named_differences([runs[number].config for number in numbers])
        settings |= dict(zip(numbers, differing, strict=True))
    return [settings[number] for number in range(len(runs))]
