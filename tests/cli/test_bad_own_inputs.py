"""Bad own data and bad model files at the command line: one sentence, and the exit status 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "data"))
from own_files import CLASSES, text_rows, write_csv, write_graph, write_images, write_table, write_texts

from profcil.cli.main import main
from profcil.io.atomic_files import read_tensors, write_tensors

QUICK = ("train.rounds=1", "train.epochs=1", "warmup.rounds=0", "clients=2", "participants=2")
MODEL = "run/model.safetensors"


def no_readable_images() -> str:
    for file in (write_images(Path("m")) / "bee").iterdir():
        file.write_bytes(b"no image")
    return "m"


def one_class() -> str:
    return str(write_csv(Path("m.csv"), ("text", "label"), [(text, "ant") for text, _ in text_rows()]))


def few_examples() -> str:
    return str(write_texts(Path("m.csv"), 3))


def two_labels() -> str:
    return str(write_csv(Path("m.csv"), ("text", "label", "class"), [(*row, "x") for row in text_rows()]))


def another_encoding() -> str:
    Path("m.csv").write_bytes("text,label\nété,a\n".encode("latin-1"))
    return "m.csv"


def unknown_node() -> str:
    with (write_graph(Path("m")) / "edges.csv").open("a") as file:
        file.write("ant-0,elk-0\n")
    return "m"


DATA = {
    "a class folder without readable images": (no_readable_images, "class folder m/bee has no readable image"),
    "one class only": (one_class, "has one class ('ant')"),
    "fewer examples than clients": (few_examples, "8 training examples for 9 clients"),
    "labels in two columns": (two_labels, "has labels in the columns label and class"),
    "text in another encoding": (another_encoding, "is not in the encoding utf-8"),
    "edges to nodes that are not there": (unknown_node, "names the node 'elk-0' in row 29"),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def refused(capsys: pytest.CaptureFixture[str], sentence: str, *line: str) -> None:
    capsys.readouterr()
    assert main(list(line)) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1, error


@pytest.mark.parametrize("line", DATA)
def test_bad_data(line, capsys):
    write, sentence = DATA[line]
    clients = ("--set", "clients=9") if write is few_examples else ()
    refused(capsys, sentence, "run", "--data", write(), "--method", "fedavg", "--quiet", *clients)
    assert not list(Path("runs").rglob("*"))


def sets() -> list[str]:
    return [word for item in QUICK for word in ("--set", item)]


def test_mixed_image_sizes_are_resized_and_this_is_said(capsys):
    write_images(Path("m"), size=12, classes=CLASSES[:3])
    write_images(Path("m"), size=20, classes=CLASSES[3:])
    assert main(["run", "--data", "m", "--method", "fedavg", "--quiet", "--out", "run", *sets()]) == 0
    shown = capsys.readouterr().err
    assert "m has images of 2 sizes; all are resized to 12 x 12" in shown and shown.count("\n") == 1


def changed(content: bytes) -> str:
    Path("changed.safetensors").write_bytes(content)
    return "changed.safetensors"


def newer() -> str:
    tensors, header = read_tensors(Path(MODEL))
    write_tensors(Path("newer.safetensors"), tensors, {**header, "format": 99, "profcil": "9.0.0"})
    return "newer.safetensors"


def truncated() -> str:
    content = Path(MODEL).read_bytes()
    return changed(content[: len(content) // 2])


def changed_digit() -> str:
    content = Path(MODEL).read_bytes()
    before, value, after = content.partition(b'\\"seed\\": 0')
    assert value
    return changed(before + b'\\"seed\\": 1' + after)


MODELS = {
    "a model file from a newer version": (newer, "was written by profcil 9.0.0 in format 99"),
    "a truncated model file": (truncated, "is damaged or is not a model file"),
    "a model file with a changed digit": (changed_digit, "is damaged or is not a model file"),
    "no model file": (lambda: changed(b""), "is damaged or is not a model file"),
}


@pytest.mark.parametrize("line", MODELS)
def test_bad_model_files(line, capsys):
    make, sentence = MODELS[line]
    write_table(Path("m.csv"))
    assert main(["run", "--data", "m.csv", "--method", "fedavg", "--quiet", "--out", "run", *sets()]) == 0
    refused(capsys, sentence, "predict", make(), "m.csv")


@pytest.mark.parametrize(
    ("write", "kind", "asked", "found"),
    [
        (write_table, "m.csv", "images", "is not a table"),
        (write_texts, "m.csv", "images/ant/0.png", "is none"),
        (write_images, "m", "texts.csv", "has no column of images"),
        (write_graph, "m", "texts.csv", "has no nodes.csv"),
    ],
)
def test_a_model_asked_for_another_modality(write, kind, asked, found, capsys):
    write(Path(kind))
    write_images(Path("images"))
    write_texts(Path("texts.csv"))
    assert main(["run", "--data", kind, "--method", "fedavg", "--quiet", "--out", "run", *sets()]) == 0
    refused(capsys, found, "predict", "run", asked)
    refused(capsys, found, "eval", "run", "--data", asked)


def test_a_model_whose_method_file_is_gone(capsys):
    Path("mine.py").write_text(
        "from profcil.extend import Method\n\n\nclass Mine(Method):\n    pass\n\n\nMETHOD = Mine\n"
    )
    write_table(Path("m.csv"))
    assert main(["run", "--data", "m.csv", "--method", "./mine.py", "--quiet", "--out", "run", *sets()]) == 0
    Path("mine.py").unlink()
    refused(capsys, "mine.py does not exist", "predict", "run", "m.csv")
