"""What is kept on this machine between runs: warm-ups, compiled kernels, what sites of a deployment hold."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PROFCIL_CACHE, or the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "profcil"
    return Path(os.environ.get("PROFCIL_CACHE") or default)
