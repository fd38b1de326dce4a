"""SECURITY.md names tests that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "mutation"))
from attack_faults import ATTACK_FAULTS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ATTACKS = [line for line in PAGE.splitlines() if re.match(r"\| D\d+ \|", line)]
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name):
    file, _, function = name.partition("::")
    path = ROOT / file
    assert path.exists()
    assert not function or f"def {function}(" in path.read_text(encoding="utf-8")


def test_every_attack_that_once_worked_has_a_test():
    assert [line.split()[1] for line in ATTACKS] == [f"D{number}" for number in range(1, 13)]
    assert all("::test_" in line for line in ATTACKS)


@pytest.mark.parametrize("line", ATTACKS, ids=lambda line: line.split()[1])
def test_each_of_these_tests_fails_with_a_fault_that_is_named(line):
    """By `tests/mutation`; without tests that show what is possible, and the one that reads no source."""
    number, tests, named = (line.split(" | ")[k].strip("| ") for k in (0, -2, -1))
    faults = [fault for fault in ATTACK_FAULTS if fault.name.startswith(f"{number}-")]
    assert re.findall(r"`([^`]+)`", named) == [fault.name for fault in faults]
    corrected = re.sub(r"; shows .*|`[^`]+` \(reads a file, no source\)", "", tests)
    assert set(re.findall(r"`tests/([^`]+)`", corrected)) == {name for fault in faults for name in fault.tests}
