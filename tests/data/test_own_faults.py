"""Bad own data: each fault is one sentence that names the place and what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from own_files import CLASSES, table_rows, text_rows, write_csv, write_graph, write_images, write_texts

from profcil.config import OwnSettings
from profcil.data.own import load
from profcil.errors import ProfcilError


def refused(path: Path, *parts: str, **settings) -> None:
    with pytest.raises(ProfcilError) as caught:
        load(path, 0, OwnSettings(**settings))
    message = str(caught.value)
    assert "\n" not in message and "; " in message, message
    for part in parts:
        assert part in message, message


# -- images -----------------------------------------------------------------------------------------------------------


def test_a_class_folder_without_images(tmp_path):
    write_images(tmp_path / "m")
    (tmp_path / "m" / "empty").mkdir()
    refused(tmp_path / "m", f"class folder {tmp_path / 'm' / 'empty'} has no image")


def test_a_class_folder_without_readable_images(tmp_path):
    write_images(tmp_path / "m")
    for file in (tmp_path / "m" / "bee").iterdir():
        file.write_bytes(b"no image")
    refused(tmp_path / "m", f"class folder {tmp_path / 'm' / 'bee'} has no readable image")


def test_one_unreadable_image(tmp_path):
    file = write_images(tmp_path / "m") / "bee" / "3.png"
    file.write_bytes(b"")
    refused(tmp_path / "m", f"{file} cannot be read as an image; remove or replace it")


@pytest.mark.parametrize("shape", [(2, 8, 8), (3, 8), (1, 4, 8)])
def test_an_impossible_shape(tmp_path, shape):
    refused(write_images(tmp_path / "m"), "own.shape is", shape=shape)


# -- classes and parts ------------------------------------------------------------------------------------------------


def test_one_class_only(tmp_path):
    rows = [(text, "ant") for text, _ in text_rows()]
    refused(write_csv(tmp_path / "m.csv", ("text", "label"), rows), "has one class ('ant')")
    refused(write_images(tmp_path / "m", classes=["ant"]), "has one class ('ant')")


def test_a_class_with_one_example(tmp_path):
    rows = [*text_rows(), ("roar", "lion")]
    refused(write_csv(tmp_path / "m.csv", ("text", "label"), rows), "one example of class 'lion'")


def test_a_class_without_training_examples(tmp_path):
    rows = [(*row, "train") for row in text_rows()] + [("roar", "lion", "test")]
    path = write_csv(tmp_path / "m.csv", ("text", "label", "split"), rows)
    refused(path, "no training example of class 'lion'")


def test_an_unknown_part(tmp_path):
    rows = [(*row, "tarin") for row in text_rows()]
    path = write_csv(tmp_path / "m.csv", ("text", "label", "split"), rows)
    refused(path, "'tarin' in column 'split', row 1")


def test_a_part_twice(tmp_path):
    write_csv(tmp_path / "train.csv", ("text", "label", "split"), [(*row, "train") for row in text_rows()])
    refused(tmp_path, "its own name says its part")


def test_a_part_without_a_column(tmp_path):
    write_texts(tmp_path / "train.csv")
    write_csv(tmp_path / "test.csv", ("text", "kind"), text_rows())
    refused(tmp_path, "test.csv lacks the column 'label'")


# -- columns and values -----------------------------------------------------------------------------------------------


def test_labels_in_two_columns(tmp_path):
    path = write_csv(tmp_path / "m.csv", ("text", "label", "class"), [(*row, "x") for row in text_rows()])
    refused(path, "has labels in the columns label and class; choose one with --set own.label=label")


def test_two_columns_of_one_name(tmp_path):
    path = write_csv(tmp_path / "m.csv", ("text", "label", "label"), [(*row, "x") for row in text_rows()])
    refused(path, "two columns with the name 'label'")


def test_no_label(tmp_path):
    path = write_csv(tmp_path / "m.csv", ("text", "kind"), text_rows())
    refused(path, "has no column with the name label; choose one of text, kind")
    refused(path, "has no column 'kine' (own.label); did you mean kind?", label="kine")
    refused(write_csv(tmp_path / "n.csv", ("text", "label"), [*text_rows(), ("who", " ")]), "has no label in row 41")


def test_texts_in_two_columns(tmp_path):
    path = write_csv(tmp_path / "m.csv", ("text", "sentence", "label"), [("a", "b", "c")])
    refused(path, "has texts in the columns text and sentence; choose one with --set own.text=text")


def test_a_column_that_is_no_number(tmp_path):
    rows = table_rows()
    rows[0][2] = "red"  # a whole column of words would be one of categories
    refused(write_csv(tmp_path / "m.csv", (*"abcd", "label"), rows), "'red' in column 'c', row 1", "own.ignore")


@pytest.mark.parametrize("value", ["", "NaN", "NA", "?", "inf"])
def test_a_missing_value(tmp_path, value):
    rows = table_rows()
    rows[6][1] = value
    refused(write_csv(tmp_path / "m.csv", (*"abcd", "label"), rows), "no value in column 'b', row 7")


def test_no_features(tmp_path):
    path = write_csv(tmp_path / "m.csv", ("label",), [(name,) for name in CLASSES])
    refused(path, "has no column beside 'label'")


def test_rows_of_different_lengths(tmp_path):
    (tmp_path / "m.csv").write_text("text,label\nyes, no,a\n")
    refused(tmp_path / "m.csv", "3 cells in row 1 where its header has 2")


def test_another_encoding(tmp_path):
    (tmp_path / "m.csv").write_bytes("text,label\nété,a\n".encode("latin-1"))
    refused(tmp_path / "m.csv", "is not in the encoding utf-8", "own.encoding=latin-1")
    refused(tmp_path / "m.csv", "own.encoding is 'laten'", encoding="laten")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("m.csv", "", "is empty"),
        ("m.csv", "text,label\n", "has no rows"),
        ("m.jsonl", '{"text": "a"', "cannot be read as JSON"),
        ("m.jsonl", "9" * 5000, "cannot be read as JSON"),
        ("m.json", "[" * 100_000, "cannot be read as JSON"),
        ("m.json", "{}", "is not a list of objects"),
        ("m.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}', "has the keys text in row 2"),
        ("m.jsonl", "1", "has no objects"),
        ("m.xlsx", "", "has none of the suffixes"),
        ("m.npz", "", "cannot be read as npz"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, part):
    (tmp_path / name).write_text(content)
    refused(tmp_path / name, part)


def test_another_modality_than_the_data_has(tmp_path):
    refused(write_images(tmp_path / "m"), "is read as image, but own.modality is graph", modality="graph")


def test_paths_that_are_no_data(tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "is not data that can be read", "--dataset NAME")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "m.parquet").write_bytes(b"")
    refused(tmp_path / "m.parquet", "pip install 'profcil[parquet]'")


# -- graphs and arrays ------------------------------------------------------------------------------------------------


def test_an_edge_to_a_node_that_is_not_there(tmp_path):
    folder = write_graph(tmp_path / "m")
    with (folder / "edges.csv").open("a") as file:
        file.write("ant-0,elk-0\n")
    refused(folder, f"{folder / 'edges.csv'} names the node 'elk-0' in row 29, which is not in nodes.csv")


def test_a_node_twice(tmp_path):
    folder = write_graph(tmp_path / "m")
    with (folder / "nodes.csv").open("a") as file:
        file.write("ant-0,ant,1,0,0,0\n")
    refused(folder, "has the node 'ant-0' twice")


@pytest.mark.parametrize(
    ("file", "header", "part"),
    [
        ("nodes.csv", "name,label,w,x,y,z", "has no column id"),
        ("edges.csv", "from,target", "has no column source"),
    ],
)
def test_a_graph_without_a_needed_column(tmp_path, file, header, part):
    path = write_graph(tmp_path / "m") / file
    _, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows]))
    refused(path.parent, part)


@pytest.mark.parametrize(
    ("arrays", "part"),
    [
        ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, "x has 4 examples and y has 3 labels"),
        ({"x": np.zeros((4, 2))}, "x without y"),
        ({"z": np.zeros(2)}, "it needs x and y"),
        ({"x": np.zeros((4, 2, 2, 2, 2)), "y": np.arange(4)}, "allowed are images"),
        ({"x": np.array([[1, np.nan]] * 4), "y": np.arange(4) % 2}, "no value in column 'column 2', row 1"),
        ({"x": np.zeros((4, 2)), "y": np.arange(4), "names": ["a", "b"]}, "the label 2 where names has 2 entries"),
        ({"x": np.zeros((4, 2)), "y": np.arange(4), "test_x": np.zeros((2, 3)), "test_y": [0, 1]}, "different shapes"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, part):
    np.savez(tmp_path / "m.npz", **arrays)
    refused(tmp_path / "m.npz", part)


def test_a_pickle_is_not_loaded(tmp_path):
    np.savez(tmp_path / "m.npz", x=np.array([object()]), y=np.zeros(1))
    refused(tmp_path / "m.npz", "cannot be read (an array has values of type object")
