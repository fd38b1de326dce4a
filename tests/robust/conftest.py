from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's warm-ups, and the variable is as before afterwards."""
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
