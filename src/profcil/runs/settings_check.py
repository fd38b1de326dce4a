"""What a run began with, beside what its config.toml says now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its dotted path."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return out


def check_settings(path: Path, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A config.toml that was edited is not that of the run beside it."""
    for key, value in began.items():
        if now.get(key) != value:
            raise RunFolderError(
                f"{path}/config.toml has {key} = {now.get(key)!r}, but the run began with {value!r}; "
                f"put it back, or start a new run with another --out"
            )
