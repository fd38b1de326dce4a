from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of finished runs; tests must not change them."""
    return make_runs(tmp_path_factory.mktemp("reported"))
