"""`make fuzz` counts attacks rightly, also over several processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tally
from tally import Counts, attempt, described, kind_of

HERE = Path(__file__).parent
TESTS = """
import pytest
from hostile import fuzz
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

@pytest.mark.parametrize("kind", ["a", "b"])
def test_three(kind):
    for refused in (True, True, kind == "a"):
        with attempt() as one:
            one.refused = refused

def test_harmful():
    with attempt():
        raise ValueError

@fuzz
@given(st.integers())
def test_drawn(number):
    with attempt() as one:
        one.refused = True

def test_without_attacks():
    pass
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_the_table_at_the_end(tmp_path, processes):
    for name in ("conftest.py", "hostile.py", "tally.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=own | {"PROFCIL_FUZZ": "9"}, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("kind "))
    assert [line.split() for line in lines[start : start + 6]] == [
        ["kind", "tried", "refused", "survived", "harmful"],
        ["drawn", "9", "9", "0", "0"],
        ["harmful", "1", "0", "0", "1"],
        ["three:", "a", "3", "3", "0", "0"],
        ["three:", "b", "3", "2", "1", "0"],
        ["all", "16", "14", "1", "1"],
    ]


def test_an_attack_that_raises_is_neither_refused_nor_survived(monkeypatch):
    monkeypatch.setattr(tally, "running", Counts())
    with pytest.raises(ValueError), attempt() as one:
        one.refused = True
        raise ValueError
    assert (tally.running.tried, tally.running.harmful) == (1, 1)


def test_kinds_and_columns():
    assert kind_of("test_own_data[texts]") == "own data: texts" and kind_of("test_models") == "models"
    assert described({"b": Counts(1000, 999, 1), "a": Counts(1, 0, 0)})[1:] == [
        "a         1        0         0        1",
        "b     1,000      999         1        0",
        "all   1,001      999         1        1",
    ]
