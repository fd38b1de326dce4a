"""Command lines of words that fit, words that do not, and odd values: one sentence or a result, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import fuzz
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

from profcil.cli.main import VERBS, main

# Verbs that could compute for long or use the network get a word that they refuse, or a flag that computes nothing.
REFUSED = ["--no-such-flag"]
HARMLESS = {
    "run": ["--dry-run"],
    "study": ["--dry-run"],
    "bench": REFUSED,
    "check": REFUSED,  # it trains the method that is named
    "doctor": REFUSED,
    "serve": REFUSED,  # it serves until it is stopped
}
FLAGS = [
    *("--dataset", "--method", "--setting", "--seed", "--set", "--json", "--out", "--data", "--data-dir", "--device"),
    *("--to", "--federation", "--test", "--run", "--format", "--store", "--threads", "--preset", "--nodes", "--host"),
    *("--deadline", "--max-message-mb", "--rebind", "--help", "--", "-h", "--quiet", "--limit", "--tasks"),
]
VALUES = [
    *("digits", "promax", "severe", "0", "-1", "1e999", "nan", "99999999999999999999", "", " ", "=", "a=b", "lr=0.1"),
    *("train.rounds=-3", "params.noise=nan", "params=[[[[", "model.width=1e30", "seed=x", "..", "/", "/dev/null", "."),
    *(
        "\x00",
        "\x1b[2J",
        "\u202e",
        "ü" * 300,
        "x" * 5000,
        "[" * 2000,
        "app",
        "env",
        "certs",
        "list",
        "methods",
        "nowhere",
    ),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize("verb", VERBS)
@fuzz
@given(words=st.lists(st.one_of(st.sampled_from(FLAGS), st.sampled_from(VALUES)), max_size=5))
def test_command_lines(verb, words, capsys):
    if verb == "deploy":
        words = [word for word in words if word != "demo"]
    line = [verb, *words, *HARMLESS.get(verb, [])]
    if "--" in words and verb in HARMLESS:
        line = [word for word in line if word != "--"]
    with attempt() as one:
        status = main(line)
        out, err = capsys.readouterr()
        assert status in (0, 1, 2), (line, status)
        assert "profcil: unexpected" not in err and "Traceback" not in err + out, (line, err)
        one.refused = status != 0
