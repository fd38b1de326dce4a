"""Own data in every form becomes the Bundle that its files describe."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from own_files import (
    CLASSES,
    table_rows,
    text_rows,
    write_csv,
    write_graph,
    write_images,
    write_table,
    write_texts,
)

from profcil.config import OwnSettings
from profcil.data.bundle import Bundle, Nodes
from profcil.data.input_format import input_format_of_json
from profcil.data.loading import load_bundle
from profcil.data.own import describe, save_arrays, save_bundle
from profcil.errors import DataNote
from profcil.resolve import resolve


def load(path: Path, seed: int = 0, **settings) -> Bundle:
    return load_bundle("own", path, seed, OwnSettings(**settings))


def counts(bundle: Bundle) -> tuple[int, ...]:
    return len(bundle.train), len(bundle.test), len(bundle.validation or ())


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
def test_texts_in_every_format_are_the_same_data(tmp_path, suffix):
    bundle = load(write_texts(tmp_path / f"mine{suffix}"))
    assert bundle.facts.modality == "text" and bundle.names == CLASSES and counts(bundle) == (32, 8, 0)
    assert torch.bincount(bundle.test.y).tolist() == [2, 2, 2, 2]
    other = load(write_texts(tmp_path / "other.csv"))
    assert bundle.fingerprint == other.fingerprint


def test_texts_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts, labels = zip(*text_rows(), strict=True)
    parquet.write_table(pyarrow.table({"text": texts, "label": labels}), tmp_path / "mine.parquet")
    assert load(tmp_path / "mine.parquet").fingerprint == load(write_texts(tmp_path / "mine.csv")).fingerprint


def test_the_words_are_those_of_the_training_part(tmp_path):
    rows = [(text, label, "test" if i < 4 else "train") for i, (text, label) in enumerate(text_rows())]
    rows[0] = ("zebra six legs", "ant", "test")
    bundle = load(write_csv(tmp_path / "mine.csv", ("text", "label", "split"), rows))
    form = bundle.input_format
    assert "legs" in form.words and "zebra" not in form.words
    assert torch.equal(form.encode_texts(["zebra six legs"])[0], bundle.test.x[0]) and bundle.test.x[0, 0] == 1
    assert bundle.vocabulary == len(form.words) + 2


def test_length_and_number_of_words_can_be_set(tmp_path):
    bundle = load(write_texts(tmp_path / "mine.csv"), length=3, vocabulary=5)
    assert bundle.train.x.shape[1] == 3 and bundle.vocabulary == 7
    assert describe(tmp_path / "mine.csv", OwnSettings()).shape == (6,)  # number 1 six legs soil today


def test_a_single_column_of_words_is_text_and_columns_can_be_chosen(tmp_path):
    path = write_csv(tmp_path / "mine.csv", ("body", "kind", "id"), [(*row, i) for i, row in enumerate(text_rows())])
    bundle = load(path, label="kind")
    assert bundle.facts.modality == "text" and bundle.input_format.words
    assert load(path, label="kind", text="body").fingerprint == bundle.fingerprint


def test_another_encoding_can_be_named(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"text,label\n" + "".join(f"été {i},a\nhiver {i},b\n" for i in range(5)).encode("latin-1"))
    assert "été" in load(path, encoding="latin-1").input_format.words


# -- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_keeps_its_values_and_the_names_of_its_columns(tmp_path):
    bundle = load(write_table(tmp_path / "mine.csv"))
    assert bundle.facts.modality == "table" and bundle.facts.encoder == "perceptron"
    assert bundle.input_format.columns == ("a", "b", "c", "d") and counts(bundle) == (40, 8, 0)
    together = torch.cat([bundle.train.x, bundle.test.x])
    wanted = torch.tensor([row[:4] for row in table_rows()])
    assert torch.equal(together.sort(0).values, wanted.sort(0).values)


def test_a_table_is_standardised_by_its_training_part_alone(tmp_path):
    rows = [[*row, "train"] for row in table_rows()]
    path = write_csv(tmp_path / "mine.csv", (*"abcd", "label", "split"), [*rows, [1e6, 1e6, 1e6, 1e6, "ant", "test"]])
    bundle = load(path)
    wanted = np.array([row[:4] for row in rows], dtype=np.float32).astype(np.float64)
    assert np.allclose(bundle.mean, wanted.mean(0)) and np.allclose(bundle.std, wanted.std(0))


def test_a_constant_column_has_deviation_one(tmp_path):
    bundle = load(write_csv(tmp_path / "m.csv", ("a", "b", "label"), [(i, 7, "xy"[i % 2]) for i in range(20)]))
    assert bundle.std[1] == 1.0


def test_new_rows_are_read_by_the_stored_format(tmp_path):
    form = input_format_of_json(json.loads(json.dumps(load(write_table(tmp_path / "m.csv")).input_format.to_json())))
    columns = {"d": ["4"], "unused": ["?"], "c": ["3"], "b": ["2.5"], "a": ["1"]}
    assert form.encode_columns(columns, "new.csv").tolist() == [[1, 2.5, 3, 4]]


def test_labels_are_sorted_as_numbers_if_they_are_numbers(tmp_path):
    rows = [(i, (10, 9, 2)[i % 3]) for i in range(30)]
    assert load(write_csv(tmp_path / "m.csv", ("x", "y"), rows)).names == ("2", "9", "10")


def test_numbers_of_rows_are_not_features_and_others_can_be_ignored(tmp_path):
    rows = [(i, i * 2.0, "note", "ab"[i % 2]) for i in range(10)]
    path = write_csv(tmp_path / "m.csv", ("", "x", "remark", "label"), rows)
    assert load(path, ignore=("remark",)).input_format.columns == ("x",)


# -- images -----------------------------------------------------------------------------------------------------------


def test_class_folders_of_images(tmp_path):
    bundle = load(write_images(tmp_path / "mine"))
    assert bundle.facts.modality == "image" and bundle.names == CLASSES and counts(bundle) == (24, 8, 0)
    assert bundle.train.x.dtype == torch.uint8 and bundle.train.x.shape[1:] == (1, 12, 12)


def test_train_val_and_test_folders_are_the_parts(tmp_path):
    for part, each in (("train", 5), ("val", 2), ("test", 3)):
        write_images(tmp_path / part, each)
    assert counts(load(tmp_path)) == (20, 12, 8)


def test_mixed_sizes_are_resized_and_this_is_said(tmp_path):
    write_images(tmp_path / "mine", size=12, classes=CLASSES[:3])
    write_images(tmp_path / "mine", size=20, classes=CLASSES[3:])
    with pytest.warns(DataNote, match="images of 2 sizes; all are resized to 12 x 12 pixels"):
        config = resolve(None, {"data": tmp_path / "mine"}, [])
    assert config.own.shape == (1, 12, 12)
    assert load(tmp_path / "mine", shape=(3, 16, 10)).train.x.shape[1:] == (3, 16, 10)


def test_images_of_one_size_need_no_note(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(None, {"data": write_images(tmp_path / "mine")}, [])


def test_large_images_are_reduced(tmp_path):
    assert describe(write_images(tmp_path / "mine", each=2, size=200), OwnSettings()).shape == (1, 64, 64)


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_a_graph_in_tables(tmp_path):
    bundle = load(write_graph(tmp_path / "mine", split=True))
    assert isinstance(bundle.train, Nodes) and counts(bundle) == (24, 8, 0)
    assert bundle.train.edges.shape == (2, 2 * 4 * 7) and bundle.input_format.columns == tuple("wxyz")
    assert bundle.train.x is not None and bundle.train.x.data_ptr() == bundle.test.x.data_ptr()


def test_a_node_without_a_label_is_in_the_graph_but_no_example(tmp_path):
    folder = write_graph(tmp_path / "mine")
    with (folder / "nodes.csv").open("a") as file:
        file.write("unknown,,0,0,0,1\n")
    bundle = load(folder)
    assert len(bundle.train.x) == 33 and sum(counts(bundle)) == 32


def test_a_graph_of_the_benchmarks(tmp_path):
    starts = np.array([0, 1, 2, 2, 2])
    attributes = {"attr_data": np.ones(4), "attr_indices": np.arange(4), "attr_indptr": np.arange(5)}
    edges = {"adj_indices": np.array([1, 0]), "adj_indptr": starts, "adj_data": np.ones(2)}
    np.savez(tmp_path / "g.npz", attr_shape=(4, 4), labels=np.array([0, 1, 0, 1]), **attributes, **edges)
    bundle = load(tmp_path / "g.npz")
    assert bundle.names == ("0", "1") and bundle.train.edges.tolist() == [[0, 1], [1, 0]]


# -- parts, arrays and Hugging Face -----------------------------------------------------------------------------------


def test_files_of_a_folder_are_the_parts(tmp_path):
    for part, each in (("train", 6), ("test", 2), ("dev", 1)):
        write_texts(tmp_path / f"{part}.csv", each)
    assert counts(load(tmp_path)) == (24, 8, 4)


def test_without_a_test_part_the_validation_part_is_tested_on(tmp_path):
    for part, each in (("train", 6), ("val", 2)):
        write_texts(tmp_path / f"{part}.csv", each)
    assert counts(load(tmp_path)) == (24, 8, 0)
    assert "its validation part is tested on" in describe(tmp_path, OwnSettings()).notes[0]


def test_a_drawn_test_part_depends_on_the_seed_alone(tmp_path):
    path = write_texts(tmp_path / "mine.csv")
    assert load(path, 1).fingerprint == load(path, 1).fingerprint != load(path, 2).fingerprint
    assert counts(load(path, test_share=0.5)) == (20, 20, 0)


def save_to_disk(folder: Path, columns: dict, features: dict) -> None:
    """Writes one part as `datasets` does: an Arrow stream, and two JSON files about it."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


def test_a_dataset_of_hugging_face_with_parts_and_class_names(tmp_path):
    features = {"text": {"_type": "Value"}, "label": {"_type": "ClassLabel", "names": ["z", "a"]}}
    for part, count in (("train", 8), ("test", 4)):
        texts = [f"{'up' if i % 2 else 'down'} {i}" for i in range(count)]
        save_to_disk(tmp_path / part, {"text": texts, "label": [i % 2 for i in range(count)]}, features)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    bundle = load(tmp_path)
    assert bundle.names == ("z", "a") and counts(bundle) == (8, 4, 0) and bundle.train.y.tolist() == [0, 1] * 4


def test_a_dataset_of_hugging_face_with_images(tmp_path):
    files = sorted(write_images(tmp_path / "images").rglob("*.png"))
    images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    save_to_disk(tmp_path / "hf", {"image": images, "label": [file.parent.name for file in files]}, {})
    bundle = load(tmp_path / "hf")
    assert bundle.facts.modality == "image" and bundle.fingerprint == load(tmp_path / "images").fingerprint


def test_arrays_of_images_and_tables(tmp_path):
    y = np.arange(20) % 2
    x = generator_array((20, 8, 8, 3))
    save_arrays(tmp_path / "images.npz", {"x": x, "y": y, "names": ["no", "yes"]})
    images = load(tmp_path / "images.npz")
    assert images.train.x.shape[1:] == (3, 8, 8) and images.names == ("no", "yes")
    save_arrays(tmp_path / "rows.npz", {"x": x[:, 0, :, 0] / 2, "y": y, "test_x": x[:6, 0, :, 0], "test_y": y[:6]})
    assert counts(load(tmp_path / "rows.npz")) == (20, 6, 0) and load(tmp_path / "rows.npz").facts.modality == "table"


def generator_array(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)


@pytest.mark.parametrize("write", [write_texts, write_table, write_graph, write_images])
def test_a_bundle_is_saved_and_read_as_it_is(tmp_path, write):
    name = {write_texts: "m.csv", write_table: "m.csv"}.get(write, "m")
    bundle = load(write(tmp_path / name))
    save_bundle(tmp_path / "saved.npz", bundle)
    again = load(tmp_path / "saved.npz")
    assert again.fingerprint == bundle.fingerprint or bundle.mean  # given statistics are part of a fingerprint
    assert (again.facts, again.names, again.mean, again.std) == (bundle.facts, bundle.names, bundle.mean, bundle.std)
    assert again.input_format == bundle.input_format and again.vocabulary == bundle.vocabulary
    for part in ("train", "test"):
        one, other = vars(getattr(bundle, part)), vars(getattr(again, part))
        assert all(torch.equal(one[key], other[key]) for key in one)
