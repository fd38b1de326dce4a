"""From own data to predictions, by the command line alone: the data is gone when the model is used."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "data"))
from own_files import CLASSES, write_graph, write_images, write_table, write_texts

from profcil.cli.main import main

FORMS = {
    "images": lambda folder: write_images(folder / "pets"),
    "texts": lambda folder: write_texts(folder / "pets.csv"),
    "table": lambda folder: write_table(folder / "pets.csv"),
    "graph": lambda folder: write_graph(folder / "pets"),
}
QUICK = ("--set", "train.rounds=2", "--set", "warmup.rounds=1", "--quiet")


def command(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(params=FORMS)
def trained(request, tmp_path, monkeypatch):
    """The folder of a run on own data, and new data of the same form. The data that it was trained on is gone."""
    monkeypatch.chdir(tmp_path)
    data = FORMS[request.param](tmp_path / "old")
    assert command("run", "--data", data, "--method", "prolin", "--out", "run", *QUICK) == 0
    shutil.rmtree(tmp_path / "old")
    return request.param, FORMS[request.param](tmp_path / "new")


def test_a_model_of_own_data_scores_new_data(trained, capsys):
    _, data = trained
    capsys.readouterr()
    assert command("eval", "run", "--data", data, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert sorted(result["classes"]) == sorted(CLASSES)
    assert result["accuracy"] > 0.9


def test_a_model_of_own_data_predicts_class_names(trained, capsys):
    _, data = trained
    capsys.readouterr()
    assert command("predict", "run", data, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and {row["classes"][0]["class"] for row in rows} == set(CLASSES)


def test_a_table_without_a_column_of_the_model_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = FORMS["table"](tmp_path)
    assert command("run", "--data", data, "--method", "fedavg", "--out", "run", *QUICK) == 0
    with data.open(newline="") as file:
        rows = [row[1:] for row in csv.reader(file)]
    with data.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    capsys.readouterr()
    assert command("predict", "run", data) == 2
    assert "which the model was trained on" in capsys.readouterr().err


def test_a_run_on_own_data_is_not_for_a_results_store(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command("run", "--data", FORMS["table"](tmp_path), "--method", "fedavg", "--out", "run", *QUICK) == 0
    capsys.readouterr()
    assert command("results", "add", "run", "--store", "store") == 2
    assert "named datasets" in capsys.readouterr().err
    assert not list(Path().glob("store/*.csv"))
