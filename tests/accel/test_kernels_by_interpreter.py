"""Runs tests/kernels in a process with Triton's interpreter; see tests/kernels/conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"


@pytest.mark.parametrize("name", sorted(path.name for path in KERNELS.glob("test_*.py")))
def test_kernels_by_triton_s_interpreter(name):
    """Each file in a process of its own, so that they can run at the same time."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNELS / name)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=KERNELS.parents[1], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
