"""Which versions of profcil compute the same results: their rows are seeds of one result.

The golden runs, every method on every modality it applies to, have had the same bits since 0.3.0 on a CPU and on a GPU.
What they do not cover and has changed nevertheless is named here. A test fails where a golden digest changes without
an entry.
"""

from __future__ import annotations

import re

FIRST = "0.3.0"  # each version before it has results of its own
CHANGED = {"fedseit": ("0.7.0",)}  # method: the versions with which its results changed
NOISE = "privacy."  # runs with these settings have other random numbers, or another rule, in nearly every version


def version_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def first_equal_version(method: str, settings: str, version: str) -> str:
    """The first version with the results that a method has in the given version. `settings` are those that differ from
    the recipe, as `key=value` pairs."""
    if any(pair.startswith(NOISE) for pair in settings.split()):
        return version
    reached = [
        first for first in (FIRST, *CHANGED.get(method, ())) if version_numbers(first) <= version_numbers(version)
    ]
    return max(reached, key=version_numbers, default=version)
