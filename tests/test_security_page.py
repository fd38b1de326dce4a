"""SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name):
    file, _, function = name.partition("::")
    path = ROOT / file
    assert path.exists()
    assert not function or f"def {function}(" in path.read_text(encoding="utf-8")


def test_every_attack_that_once_worked_has_a_test():
    lines = [line for line in PAGE.splitlines() if re.match(r"\| D\d+ \|", line)]
    assert [line.split()[1] for line in lines] == [f"D{number}" for number in range(1, 13)]
    assert all("::test_" in line for line in lines)
