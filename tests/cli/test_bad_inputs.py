"""Bad inputs from the command line: each is one sentence on the screen and status 2, and nothing is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.io.atomic_files import read_tensors, write_tensors

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))  # for the module `own_files`

from own_files import CLASSES, text_rows, write_csv, write_graph, write_images, write_table, write_texts

QUICK = [part for item in ("train.rounds=1", "train.epochs=1", "warmup.rounds=1") for part in ("--set", item)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PROFCIL_DEBUG", raising=False)


def class_folder_without_readable_images() -> None:
    folder = write_images(Path("m")) / CLASSES[1]
    for file in folder.iterdir():
        file.write_text("not an image")


def one_class_only() -> None:
    write_csv(Path("m.csv"), ("text", "label"), text_rows(classes=CLASSES[:1]))


def labels_in_two_columns() -> None:
    write_csv(Path("m.csv"), ("text", "label", "class"), [(text, name, name) for text, name in text_rows()])


def text_in_another_encoding() -> None:
    Path("m.csv").write_bytes("text,label\nschön,a\nübel,b\n".encode("latin-1"))


def edges_to_nodes_that_are_not_there() -> None:
    write_csv(write_graph(Path("m")) / "edges.csv", ("source", "target"), [("ant-0", "owl-7")])


BAD: dict[str, tuple[Callable[[], object], list[str], str]] = {
    "a class folder without readable images": (
        class_folder_without_readable_images,
        ["--data", "m"],
        "bee",
    ),
    "one class only": (one_class_only, ["--data", "m.csv"], "one class"),
    "fewer examples than clients": (
        lambda: write_table(Path("m.csv")),
        ["--data", "m.csv", "--set", "clients=99"],
        "40 training examples for 99 clients",
    ),
    "labels in two columns": (labels_in_two_columns, ["--data", "m.csv"], "label and class"),
    "text in another encoding": (text_in_another_encoding, ["--data", "m.csv"], "own.encoding"),
    "edges to nodes that are not there": (edges_to_nodes_that_are_not_there, ["--data", "m"], "owl-7"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_sentence_and_status_2(name, capsys):
    if "image" in name:
        pytest.importorskip("PIL")
    write, line, part = BAD[name]
    write()
    assert main(["run", *line, "--quiet"]) == 2
    assert_one_sentence(capsys.readouterr().err, part)
    assert not list(Path("runs").rglob("*"))


def assert_one_sentence(shown: str, part: str) -> None:
    assert part in shown and shown.count("\n") == 1 and "; " in shown, shown


def test_text_in_another_encoding_is_read_when_it_is_named(capsys):
    rows = "\n".join(f"schön nummer {i},{'ab'[i % 2]}" for i in range(20))
    Path("m.csv").write_bytes(f"text,label\n{rows}\n".encode("latin-1"))
    assert main(["plan", "--data", "m.csv", "--set", "own.encoding=latin-1"]) == 0


def test_images_of_several_sizes_are_resized_and_said(capsys):
    pytest.importorskip("PIL")
    write_images(Path("m"), size=12, classes=CLASSES[:3])
    write_images(Path("m"), size=20, classes=CLASSES[3:])
    assert main(["run", "--data", "m", "--dry-run"]) == 0
    assert "profcil: note: m has images of 2 sizes; all are resized" in capsys.readouterr().err


@pytest.fixture
def model() -> str:
    """The model of a small run on texts."""
    write_texts(Path("texts.csv"))
    assert main(["run", "--data", "texts.csv", "--method", "fedavg", *QUICK, "--out", "run", "--quiet"]) == 0
    return "run/model.safetensors"


def test_a_model_file_of_a_newer_version(model, capsys):
    tensors, header = read_tensors(Path(model))
    write_tensors(Path("newer.safetensors"), tensors, {**header, "format": 99, "profcil": "9.0.0"})
    for line in (["predict", "newer.safetensors", "x"], ["eval", "newer.safetensors", "--data", "texts.csv"]):
        assert main(line) == 2
        assert_one_sentence(capsys.readouterr().err, "was written by profcil 9.0.0 in format 99")


def test_a_model_asked_for_another_modality(model, capsys):
    pytest.importorskip("PIL")
    write_images(Path("images"))
    write_graph(Path("graph"))
    capsys.readouterr()
    for given in ("images", "images/ant/0.png", "graph"):
        assert main(["predict", model, given]) == 2
        assert_one_sentence(capsys.readouterr().err, "this is a model of texts")
    write_table(Path("numbers.csv"))
    assert main(["eval", model, "--data", "numbers.csv"]) == 2
    assert_one_sentence(capsys.readouterr().err, "numbers.csv has no column with the name text")
    assert json.loads(Path("run/run.json").read_text())["done"]
