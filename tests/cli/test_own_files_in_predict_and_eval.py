"""What `profcil run --data` reads, `predict` and `eval` read too: the model knows how its data was read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "data"))
from own_files import CLASSES, table_rows, text_rows, write_csv, write_graph, write_images, write_table
from test_own_data import save_to_disk

from profcil.cli.main import main

QUICK = ("train.rounds=1", "train.epochs=1", "warmup.rounds=0", "clients=2", "participants=2")


def named_columns(folder: Path) -> tuple[Path, int]:
    rows = [(i, text, label) for i, (text, label) in enumerate(text_rows())]
    return write_csv(folder / "m.csv", ("number", "remark", "kind"), rows, ";"), 40


def latin(folder: Path) -> tuple[Path, int]:
    path = write_csv(folder / "m.csv", ("Text", "Class"), [(f"été {text}", label) for text, label in text_rows()])
    path.write_bytes(path.read_text(encoding="utf-8").encode("latin-1"))
    return path, 40


def parquet_texts(folder: Path) -> tuple[Path, int]:
    parquet = pytest.importorskip("pyarrow.parquet")
    texts, labels = zip(*text_rows(), strict=True)
    parquet.write_table(pytest.importorskip("pyarrow").table({"review": texts, "intent": labels}), folder / "m.parquet")
    return folder / "m.parquet", 40


def parquet_table(folder: Path) -> tuple[Path, int]:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = dict(zip((*"abcd", "target"), zip(*table_rows(), strict=True), strict=True))
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), folder / "m.parquet")
    return folder / "m.parquet", 48


def json_table(folder: Path) -> tuple[Path, int]:
    rows = [dict(zip((*"abcd", "label"), row, strict=True)) for row in table_rows()]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "m.jsonl", 48


def hugging_face(folder: Path) -> tuple[Path, int]:
    names = {"label": {"_type": "ClassLabel", "names": list(CLASSES)}}
    texts, labels = zip(*text_rows(), strict=True)
    columns = {"text": list(texts), "label": [CLASSES.index(label) for label in labels]}
    for part in ("train", "test"):
        save_to_disk(folder / "hf" / part, columns, names)
    (folder / "hf" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder / "hf", 80


def hugging_face_images(folder: Path) -> tuple[Path, int]:
    files = sorted(write_images(folder / "images").rglob("*.png"))
    images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    save_to_disk(folder / "hf", {"image": images, "label": [file.parent.name for file in files]}, {})
    return folder / "hf", 32


def files_of_parts(folder: Path) -> tuple[Path, int]:
    for part, each in (("train", 8), ("test", 4)):
        write_table(folder / "parts" / f"{part}.csv", each)
    return folder / "parts", 48


def array_table(folder: Path) -> tuple[Path, int]:
    rows = table_rows()
    np.savez(folder / "m.npz", x=np.array([row[:4] for row in rows]), y=np.array([row[4] for row in rows]))
    return folder / "m.npz", 48


def array_images(folder: Path) -> tuple[Path, int]:
    x = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 3)).astype(np.uint8)
    np.savez(folder / "m.npz", x=x, y=np.arange(24) % 2, names=["no", "yes"])
    return folder / "m.npz", 24


def deep_tiffs(folder: Path) -> tuple[Path, int]:
    image = pytest.importorskip("PIL.Image")
    for file in sorted(write_images(folder / "m" / "train").rglob("*.png")):
        below = file.parent / "scans"
        below.mkdir(exist_ok=True)
        image.open(file).save(below / f"{file.stem}.TIFF")
        file.unlink()
    return folder / "m", 32


def graph(folder: Path) -> tuple[Path, int]:
    pytest.importorskip("torch_geometric")
    path = write_graph(folder / "m")
    with (path / "nodes.csv").open("a") as file:
        file.write("unknown,,0,0,0,1\n")  # a node without a label is predicted, and not scored
    return path, 32


FORMS = (
    (named_columns, ("own.label=kind", "own.text=remark")),
    (latin, ("own.encoding=latin-1",)),
    (parquet_texts, ()),
    (parquet_table, ()),
    (json_table, ()),
    (hugging_face, ()),
    (hugging_face_images, ()),
    (files_of_parts, ()),
    (array_table, ()),
    (array_images, ()),
    (deep_tiffs, ()),
    (graph, ()),
)


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> object:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def sets_of(items: tuple[str, ...]) -> list[str]:
    return [word for item in items for word in ("--set", item)]


@pytest.mark.parametrize(("write", "sets"), FORMS, ids=[write.__name__ for write, _ in FORMS])
def test_the_files_of_a_run_can_be_predicted_and_scored(write, sets, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    data, count = write(tmp_path)
    run = ["run", "--data", data, "--method", "fedavg", "--out", "run", "--json", "--quiet"]
    printed(capsys, *run, *sets_of((*QUICK, *sets)))
    Path("run/model.safetensors").rename("alone.safetensors")
    scored = printed(capsys, "eval", "alone.safetensors", "--data", data, "--json")
    assert scored["examples"] == count == sum(map(sum, scored["confusion"]))
    rows = printed(capsys, "predict", "alone.safetensors", data, "--json")
    assert len(rows) == count + (write is graph)


def test_other_columns_can_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    write_csv(tmp_path / "m.csv", ("text", "label"), text_rows())
    write_csv(tmp_path / "other.csv", ("said", "kind", "class"), [(*row, "x") for row in text_rows()])
    printed(capsys, "run", "--data", "m.csv", "--method", "fedavg", "--out", "run", "--json", *sets_of(QUICK))
    assert main(["eval", "run", "--data", "other.csv"]) == 2
    assert "own.text=NAME" in capsys.readouterr().err
    named = printed(
        capsys, "eval", "run", "--data", "other.csv", "--json", *sets_of(("own.label=kind", "own.text=said"))
    )
    assert named["accuracy"] == printed(capsys, "eval", "run", "--data", "m.csv", "--json")["accuracy"]
    assert main(["eval", "run", "--data", "other.csv", "--set", "own.shape=[1, 8, 8]"]) == 2
    assert "allowed are own.label, own.text, own.ignore, own.encoding" in capsys.readouterr().err


def test_a_path_is_never_read_as_a_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    write_csv(tmp_path / "m.csv", ("text", "label"), text_rows())
    printed(capsys, "run", "--data", "m.csv", "--method", "fedavg", "--out", "run", "--json", *sets_of(QUICK))
    Path("notes.docx").write_bytes(b"PK")
    for item, sentence in (("notes.docx", "is none"), ("gone.parquet", "does not exist"), ("run", "is none")):
        assert main(["predict", "run", item]) == 2
        assert f"{item} {sentence}" in capsys.readouterr().err
