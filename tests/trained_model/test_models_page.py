"""The commands and the Python code of docs/models.md run as printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from profcil.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """The first code block of a kind."""
    return PAGE.partition(f"```{kind}\n")[2].partition("```")[0]


def test_commands_and_code_run_as_printed(capsys, monkeypatch, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("PIL")
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    outputs = []
    for line in block("").splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "profcil" and main(words[1:]) == 0, line
        outputs.append(capsys.readouterr().out)
    assert "3 " in outputs[2] and "accuracy" in outputs[4] and Path("confusion.csv").exists()
    first = next(line for line in outputs[3].splitlines() if line.startswith("digits/3/"))
    assert outputs[-1].splitlines()[0] == first
    exec(compile(block("python"), "models.md", "exec"), {})
    assert "['3']" in capsys.readouterr().out
