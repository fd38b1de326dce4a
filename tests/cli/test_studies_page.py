"""The examples of docs/studies.md and docs/metrics.md run as printed; study files at smoke scale."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.resolve import resolve
from profcil.studies.definition import Study, Variant

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "studies.md").read_text(encoding="utf-8")
TABLES = {text.split()[1]: text for text in re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)}
RECIPE = TABLES["recipe.toml"]
FILES = {name: text for name, text in TABLES.items() if name != "recipe.toml"}


def test_the_page_has_study_files():
    assert set(FILES) == {"mine.toml", "choose.toml"}


def test_the_recipe_of_the_page_is_read_as_it_says():
    Path("recipe.toml").write_text(RECIPE)
    severe = resolve("recipe.toml")
    assert (severe.seed, severe.stream.clients, severe.train.rounds, severe.train.lr) == (1, 6, 5, 0.02)
    assert severe.params.noise == 0.5 and resolve("recipe.toml", {"setting": "homogeneous"}).params.noise == 0.2
    assert severe.train.epochs == resolve("digits").train.epochs  # from the built-in recipe


@pytest.mark.parametrize("name", FILES)
def test_a_study_file_runs_at_smoke_scale(name, capsys):
    Path(name).write_text(FILES[name])
    assert main(["study", name, "--scale", "smoke", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    expected = {
        "mine.toml": ["fedavg", "promax", "promax (no noise)"],
        "choose.toml": ["fedavg (lr=0.01)", "fedavg (lr=0.05)"],
    }
    assert [row["method"] for row in rows] == expected[name] and all(row["seeds"] == 1 for row in rows)


def test_every_command_of_the_page_is_accepted(capsys):
    for name, text in TABLES.items():
        Path(name).write_text(text)
    commands = [line.partition("#")[0] for line in PAGE.splitlines() if line.startswith("profcil ")]
    assert len(commands) > 8
    for line in commands:
        words = [word for word in shlex.split(line)[1:] if word != "--dry-run"]
        assert main([*words, "--dry-run"]) == 0, line
    assert "9 runs, 9 of them to do, in runs/sweep" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["studies.md", "metrics.md"])
def test_the_python_examples_run(page, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)
    exec(example, {})
    out = capsys.readouterr().out
    assert ("{'params.noise': 0.1}" if page == "studies.md" else "'bwt'") in out


def test_the_page_names_every_key():
    keys = re.findall(r"`(\w+)`", PAGE.partition("| key | what it is |")[2].partition("\n\n")[0])
    assert {*Study.__dataclass_fields__, *Variant.__dataclass_fields__} - {"variants", "scale"} <= set(keys)
