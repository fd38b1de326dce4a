"""docs/architecture.md names the files that one round of PRO-MAX on a CPU executes, all of them and no others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "architecture.md"
HEADING = "## One round of PRO-MAX on a CPU"


def test_the_page_names_the_files_that_a_round_executes() -> None:
    done = subprocess.run([sys.executable, str(HERE / "round_files.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z_0-9/]+\.py)`", section)  # not the script: a command has spaces
    assert sorted(named) == done.stdout.split()
    assert f"{len(named)} files" in section
