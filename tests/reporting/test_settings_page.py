"""The list of settings is complete, every setting has a help text, and the committed page is up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profcil import registry
from profcil.cli.main import main
from profcil.reporting.settings import list_settings, render_page
from profcil.resolve import TOP_LEVEL, known_paths, resolve

COMMITTED = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_committed_page_is_up_to_date():
    """Update it with `profcil list settings --page docs/settings.md`."""
    assert COMMITTED.read_text(encoding="utf-8") == render_page()


def test_every_setting_of_every_method_is_listed_with_a_help_text():
    for name in registry.names("methods"):
        listed = list_settings(name)
        known = {*known_paths(registry.find("methods", name).METHOD.Params), *TOP_LEVEL}
        assert {row["setting"] for row in listed} == known
        assert all(row["help"] and row["type"] for row in listed)


def test_the_list_as_text_and_as_json(capsys):
    assert main(["list", "settings", "--method", "fedprox"]) == 0
    text = capsys.readouterr().out
    assert "params.mu" in text and "μ of the proximal term" in text and "params.noise" not in text
    assert main(["list", "settings", "--method", "fedprox", "--json"]) == 0
    found = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["train.momentum"] == {
        "setting": "train.momentum",
        "of": "every run",
        "type": "number",
        "default": "0.9",
        "allowed": "between 0.0 and 1.0",
        "help": "momentum of SGD",
    }
    assert found["stream.support"]["default"] == "homogeneous 1.0, severe 0.4"
    assert found["accelerate"]["allowed"] == "auto, off"


def test_with_a_dataset_defaults_come_from_its_recipe():
    found = {row["setting"]: row["default"] for row in list_settings("promax", "digits")}
    assert found["model.encoder"] == '"convnet"'  # not "", which stands for the dataset's default
    assert found["dataset"] == '"digits"' and found["stream.clients"].isdigit() and found["stream.support"] == "0.4"


def test_with_a_dataset_and_a_method_the_defaults_are_those_of_a_run():
    """PRO-LIN has settings of its own in the recipe of digits."""
    found = {row["setting"]: row["default"] for row in list_settings("prolin", "digits")}
    run = resolve(None, {"dataset": "digits", "method": "prolin"})
    assert found["params.dictionary"] == str(run.params.dictionary) != str(type(run.params)().dictionary)
    assert found["train.lr"] == str(run.train.lr) != str(type(run.train)().lr)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["list", "settings", "--method", "promx"], "did you mean promax"),
        (["list", "settings", "--dataset", "digit"], "did you mean digits"),
        (["list", "methods", "--method", "pro"], "it is for `list settings`"),
        (["list", "settings", "--method", "pro", "--page", "x.md"], "it is for `list settings`"),
        (["run", "--set", "task_sizes=2"], "`profcil list settings` shows all"),
        (["list", "settings", "--page", "mine.md"], "is not a page of settings"),
    ],
)
def test_errors_are_one_sentence(tmp_path, monkeypatch, capsys, line, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.md").write_text("mine")
    assert main(line) == 2
    assert message in (err := capsys.readouterr().err) and err.count("\n") == 1
    assert Path("mine.md").read_text() == "mine" and not Path("x.md").exists()


def test_an_unknown_key_of_a_recipe_points_to_the_list_of_settings(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("[train]\nlrr = 1.0\n")
    assert main(["run", str(tmp_path / "mine.toml")]) == 2
    assert "did you mean lr? (`profcil list settings` shows all)" in capsys.readouterr().err
