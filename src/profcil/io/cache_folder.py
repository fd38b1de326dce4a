"""The folder for what is reused between runs: warm-ups, compiled kernels, the private state of deployment sites."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PROFCIL_CACHE, or `profcil` in the user's cache folder."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PROFCIL_CACHE") or user_cache / "profcil")


def make_private_folder(path: Path) -> None:
    """Makes a folder, and the missing ones above it, that no other user can read or write."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
