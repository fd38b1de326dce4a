"""The version is defined in one place, and every other mention agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import profcil
from profcil.cli.main import main

ROOT = Path(__file__).parents[1]


def test_the_command_line_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"profcil {profcil.__version__}\n"


def test_the_build_reads_it_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "profcil.__version__"}


def test_the_citation_and_the_changelog_name_it() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (\S+)$", citation, re.M)[1] == profcil.__version__
    released = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert released[0] == profcil.__version__
