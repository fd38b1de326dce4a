"""`profcil predict` and `profcil eval` on images, texts and graphs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from saved_examples import FILES, WRITERS, text_of

import profcil
from profcil.cli.main import main
from profcil.runs.models.evaluation import calibration_error, fit_temperature, rejection_auroc
from profcil.runs.models.labelled_inputs import read_inputs

MODALITIES = ("image", "text", "graph")


def printed_json(capsys, *line):
    assert main([str(part) for part in line]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("modality", MODALITIES)
def test_predictions_from_files_are_those_from_tensors(saved, modality, capsys):
    found = saved(modality)
    path = WRITERS[modality](found, Path(FILES[modality]))
    model = profcil.load_model(found.folder)
    rows = printed_json(capsys, "predict", found.folder, path, "--json", "--top", 3)
    if modality == "image":  # files are read folder by folder
        order = found.test.y.sort(stable=True).indices
        expected = model.probabilities(found.test.x[order])
    elif modality == "text":
        expected = model.probabilities(found.test.x)
    else:
        expected = model.probabilities(found.test.x, found.test.edges)
    assert [row["classes"][0]["class"] for row in rows] == model.names_of(expected.argmax(1))
    shown = torch.tensor([[c["probability"] for c in row["classes"]] for row in rows])
    torch.testing.assert_close(shown.double(), expected.topk(3, 1).values, atol=2e-6, rtol=0)


@pytest.mark.parametrize("modality", MODALITIES)
def test_eval_counts_every_example_once(saved, modality, capsys):
    found = saved(modality, "prolin")
    path = WRITERS[modality](found, Path(FILES[modality]))
    result = printed_json(capsys, "eval", found.folder, "--data", path, "--json", "--confusion", "confusion.csv")
    matrix = torch.tensor(result["confusion"])
    count = len(found.test.x) if modality == "graph" else len(found.test.y)
    assert int(matrix.sum()) == count == result["examples"]
    assert result["accuracy"] == pytest.approx(int(matrix.diagonal().sum()) / count)
    assert sum(row["examples"] for row in result["per_class"].values()) == count
    with open("confusion.csv") as file:
        rows = list(csv.reader(file))
    assert rows[0][1:] == result["classes"] and [list(map(int, row[1:])) for row in rows[1:]] == matrix.tolist()
    wrong = matrix.clone().fill_diagonal_(0)
    assert [row["times"] for row in result["confusions"]] == [
        n for n in wrong.flatten().sort(descending=True)[0][:10].tolist() if n
    ]
    assert main(["eval", str(found.folder), "--data", str(path)]) == 0
    assert f"of {count} examples" in capsys.readouterr().out


def test_texts_come_from_arguments_files_and_standard_input(saved, capsys, monkeypatch):
    found = saved("text")
    texts = [text_of(x) for x in found.test.x[:4]]
    expected = printed_json(capsys, "predict", found.folder, *texts, "--json")
    Path("a.txt").write_text("\n".join(texts) + "\n\n")
    Path("a.tsv").write_text("\n".join(["text", *texts]))
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    Path("a.json").write_text(json.dumps([{"text": text} for text in texts]))
    for name in ("a.txt", "a.tsv", "a.jsonl", "a.json"):
        assert printed_json(capsys, "predict", found.folder, name, "--json") == expected
    assert printed_json(capsys, "predict", found.folder, "w3 and a.csv", "--json")[0]["input"] == "w3 and a.csv"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert printed_json(capsys, "predict", found.folder, "-", "--json") == expected


def test_output_as_text_and_csv(saved, capsys):
    found = saved("text")
    assert main(["predict", str(found.folder), "w3, w4", "w30", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["w3, w4", "w30"] and {line.count("\t") for line in lines} == {2}
    assert main(["predict", str(found.folder), "w3, w4", "w30", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["input"] for row in rows] == ["w3, w4", "w30"] and {row["rank"] for row in rows} == {"1"}


def test_rejection_takes_the_least_certain_inputs_and_at_zero_none(saved, capsys):
    found = saved("image", "prolin")
    path = WRITERS["image"](found, Path("images"))
    rejected = {}
    for threshold in ("0", "0.9", "1"):
        rows = printed_json(capsys, "predict", found.folder, path, "--json", "--reject", threshold)
        rejected[threshold] = sum(row["rejected"] for row in rows)
        for row in rows:
            assert row["rejected"] == (row["classes"][0]["probability"] < float(threshold))
    assert rejected["0"] == 0 < rejected["0.9"] < len(rows)
    assert main(["predict", str(found.folder), str(path), "--reject", "1"]) == 0
    assert "none of these (" in capsys.readouterr().out


def test_chosen_nodes_of_a_graph(saved, capsys):
    found = saved("graph")
    path = WRITERS["graph"](found, Path("graph"))
    everything = {row["input"]: row for row in printed_json(capsys, "predict", found.folder, path, "--json")}
    some = printed_json(capsys, "predict", found.folder, path, "--json", "--nodes", "n7,n2")
    assert some == [everything["n7"], everything["n2"]]


def test_calibration_is_kept_beside_the_model_and_belongs_to_it(saved, capsys, tmp_path):
    found = saved("text", "prolin")
    path = WRITERS["text"](found, Path("texts.csv"))
    folder = tmp_path / "copy"
    assert main(["export", str(found.folder), "--safetensors", str(folder / "model.safetensors")]) == 0
    capsys.readouterr()
    before = profcil.load_model(folder).temperature
    result = printed_json(capsys, "eval", folder, "--data", path, "--calibrate", "--json")
    assert profcil.load_model(folder).temperature == result["temperature"] != before
    other = saved("text").folder / "model.safetensors"
    (folder / "model.safetensors").write_bytes(other.read_bytes())
    assert profcil.load_model(folder).temperature == 1.0  # the fitted one was for another model


def test_a_fitted_temperature_recovers_the_scale_of_log_probabilities():
    rng = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(4000, 5, generator=rng).double()
    y = torch.multinomial(scores.softmax(1), 1, generator=rng).flatten()
    assert fit_temperature(7 * scores, y) == pytest.approx(7, rel=0.1)
    calibrated = calibration_error(scores.softmax(1), y)
    too_certain = calibration_error((7 * scores).softmax(1), y)
    assert calibrated < 0.03 < too_certain


def test_auroc_is_the_share_of_pairs_in_order():
    inside = torch.tensor([0.9, 0.5, 0.5])
    outside = torch.tensor([0.5, 0.1])
    assert rejection_auroc(inside, outside) == pytest.approx((2 + 1.5 + 1.5) / 6)


def test_eval_with_inputs_of_no_class(saved, capsys):
    found = saved("text", "prolin")
    path = WRITERS["text"](found, Path("texts.csv"))
    Path("none.txt").write_text("unknown words\nnothing of this\n")
    result = printed_json(capsys, "eval", found.folder, "--data", path, "--none", "none.txt", "--json")
    assert 0 <= result["rejection_auroc"] <= 1


def test_a_table_is_read_by_column_names(saved):
    """A model of tables comes from own data; here the reader alone is tested."""
    from dataclasses import replace
    from types import SimpleNamespace

    from profcil.data.input_format import InputFormat

    form = InputFormat("table", (2,), columns=("b", "a"))
    model = SimpleNamespace(
        header={}, modality="table", expect=lambda modality: form, like=(torch.zeros(0, 2),), names=("x", "y")
    )
    Path("t.csv").write_text("a,label,b\n1,x,2\n3,y,4\n")
    given = read_inputs(model, ["t.csv"], labelled=True)
    assert given.inputs[0].tolist() == [[2, 1], [4, 3]] and given.labels == ["x", "y"]
    assert replace(given, labels=[]).names == ["t.csv:1", "t.csv:2"]


MISTAKES = {
    ("image", "predict", "text.txt"): "this is a model of images, and text.txt is not an image",
    ("image", "predict", "absent.png"): "absent.png does not exist",
    ("image", "predict", "broken.png"): "broken.png cannot be read as an image",
    ("image", "predict", "empty"): "empty has no inputs",
    ("text", "predict", "broken.png"): "this is a model of texts, and broken.png is none",
    ("text", "predict", "empty"): "this is a model of texts, and empty is none",
    ("text", "predict", "absent.csv"): "absent.csv does not exist",
    ("text", "predict", "other.csv"): "other.csv has no column with the name text",
    ("graph", "predict", "text.txt"): "this is a model of graphs, and text.txt has no nodes.csv",
    ("graph", "predict", "empty"): "this is a model of graphs, and empty has no nodes.csv",
    ("text", "eval", "wrong.csv"): "wrong.csv has the label 'eleven', which is not a class of this model",
    ("text", "eval", "text.txt"): "text.txt cannot be read as texts with labels; give a file with a column of labels",
}


@pytest.mark.parametrize(("modality", "verb", "path"), MISTAKES)
def test_a_mistake_is_one_sentence(saved, capsys, modality, verb, path):
    Path("text.txt").write_text("hello\n")
    Path("broken.png").write_bytes(b"no image")
    Path("empty").mkdir()
    Path("other.csv").write_text("words,more,label\na,b,c\n")
    Path("wrong.csv").write_text("text,label\nw3,eleven\n")
    arguments = ["--data", path] if verb == "eval" else [path]
    assert main([verb, str(saved(modality).folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[modality, verb, path] in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--top", "0"], ["--reject", "2"], ["--reject", "x"], ["--json", "--csv"], ["--nodes", "1"]]
)
def test_wrong_flags_are_one_sentence(saved, capsys, flags):
    assert main(["predict", str(saved("text").folder), "hello", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_examples_of_a_dataset_are_files_that_the_model_reads(capsys):
    paths = printed_json(capsys, "data", "examples", "digits", "--count", 12, "--out", "digits", "--json")
    assert len(paths) == 12 and {Path(path).parent.name for path in paths} == set("0123456789")
    settings = {"train.rounds": 1, "warmup.rounds": 1, "clients": 4, "participants": 2, "task_size": 5}
    profcil.run("digits", method="prolin", out="run", settings=settings)
    rows = printed_json(capsys, "predict", "run", "digits", "--json")
    assert sorted(row["input"] for row in rows) == sorted(paths)
    right = [row["classes"][0]["class"] == Path(row["input"]).parent.name for row in rows]
    assert sum(right) >= 10
    assert main(["data", "examples", "digits"]) == 2 and main(["data", "examples", "digits", "--count", "x"]) == 2
