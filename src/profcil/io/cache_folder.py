"""The folder for what is reused between runs: warm-ups, compiled kernels, the private state of deployment sites."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PROFCIL_CACHE, or `profcil` in the user's cache folder."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PROFCIL_CACHE") or user_cache / "profcil")
