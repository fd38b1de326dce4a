"""Columns of categories in own tables: how they become numbers, and that a model reads the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_files import write_csv
from test_own_data import load
from test_own_faults import refused

from profcil.cli.main import main
from profcil.data._categories import HASHED, MOST
from profcil.data.input_format import input_format_of_json
from profcil.runs.models.loading import load_model

COLOURS = ("red", "green", "blue")


def write_shapes(path: Path, each: int = 12, colours: tuple[str, ...] = COLOURS) -> Path:
    """The colour tells the class; the number does not."""
    rows = [(i % 7, colour, f"class of {colour}") for i in range(each) for colour in colours]
    return write_csv(path, ("size", "colour", "label"), rows)


def test_a_category_becomes_one_column_for_each_value_of_the_training_part(tmp_path):
    bundle = load(write_shapes(tmp_path / "m.csv"))
    assert bundle.facts.modality == "table"
    assert bundle.train.x.shape[1] == 4  # size, and blue, green, red in this order
    assert bundle.input_format.categories == (("colour", ("blue", "green", "red")),)
    x = bundle.input_format.encode_columns({"size": [3, 4, 5], "colour": ["green", "mauve", ""]}, "here")
    assert x.tolist() == [[3, 0, 1, 0], [4, 0, 0, 0], [5, 0, 0, 0]]  # unknown and missing: all zeros


def test_many_values_are_hashed_and_names_are_refused(tmp_path):
    def rows(repeats: int) -> list[tuple]:
        return [(i, f"street {i % 60}", "ab"[i % 2]) for i in range(60 * repeats)]

    bundle = load(write_csv(tmp_path / "many.csv", ("size", "street", "label"), rows(6)))
    assert bundle.train.x.shape[1] == 1 + HASHED and bundle.input_format.categories == (("street", ()),)
    assert bundle.train.x[:, 1:].sum(1).tolist() == [1.0] * len(bundle.train)
    path = write_csv(tmp_path / "names.csv", ("size", "street", "label"), rows(1) + rows(1)[:20])
    refused(path, "different values in column 'street'", "no category", "own.ignore")
    assert MOST < 60


def test_a_word_among_numbers_is_a_mistake_and_no_category(tmp_path):
    rows = [(1, i if i != 5 else "1O", "ab"[i % 2]) for i in range(20)]
    refused(write_csv(tmp_path / "m.csv", ("width", "size", "label"), rows), "'1O' in column 'size', row 6")


def test_a_stored_format_reads_as_before(tmp_path):
    form = load(write_shapes(tmp_path / "m.csv")).input_format
    again = input_format_of_json(json.loads(json.dumps(form.to_json())))
    assert again == form
    columns = {"size": ["1"], "colour": ["red"]}
    assert again.encode_columns(columns, "x").tolist() == form.encode_columns(columns, "x").tolist()


def test_a_model_predicts_and_scores_the_same_csv_and_says_how_it_reads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    path = write_shapes(tmp_path / "m.csv")
    sets = ["--set", "train.rounds=1", "--set", "warmup.rounds=1", "--set", "clients=2", "--set", "participants=2"]
    out = tmp_path / "run"
    assert main(["run", "--data", str(path), "--method", "prolin", "--dry-run", *sets]) == 0
    assert "columns of categories" in "".join(capsys.readouterr())
    assert main(["run", "--data", str(path), "--method", "prolin", *sets, "--out", str(out), "--quiet"]) == 0
    model = out / "model.safetensors"
    assert load_model(model).input_format.categories == (("colour", ("blue", "green", "red")),)
    capsys.readouterr()
    assert main(["eval", str(model), "--data", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1
    new = write_csv(tmp_path / "new.csv", ("colour", "size"), [("blue", 2), ("mauve", 2)])
    assert main(["predict", str(model), str(new), "--csv"]) == 0
    assert "class of blue" in capsys.readouterr().out.splitlines()[1]
    lacking = write_csv(tmp_path / "lacking.csv", ("size",), [(2,)])
    assert main(["predict", str(model), str(lacking)]) == 2
    assert "no column 'colour'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv"])
def test_categories_in_other_files(tmp_path, suffix):
    columns = ("size", "colour", "label")
    rows = [(i % 5, COLOURS[i % 3], "ab"[i % 2]) for i in range(24)]
    path = tmp_path / f"m{suffix}"
    if suffix == ".tsv":
        write_csv(path, columns, rows, "\t")
    else:
        path.write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    assert load(path).input_format.categories == (("colour", ("blue", "green", "red")),)
