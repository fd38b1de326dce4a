"""Compares the settings a run started with and the settings in its config.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError

MACHINE = ("device", "threads", "workers", "accelerate")  # where a run is computed; may change when it is resumed
SEED_AND_MACHINE = ("seed", *MACHINE)  # may differ between two runs whose numbers are averaged
WITHOUT_EFFECT = (
    *SEED_AND_MACHINE,
    "keep_memories",
    "keep_states",
)  # settings other than these make two runs different in a table


def flatten_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its dotted name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def check_settings(path: Path, original: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuses a config.toml that was edited after the run started."""
    for key, value in original.items():
        if current.get(key) != value:
            raise RunFolderError(
                f"{path}/config.toml has {key} = {current.get(key)!r}, but the run started with {value!r}; "
                f"restore that value, or start a new run with another --out"
            )
