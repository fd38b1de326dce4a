"""Files as people have them: photographs on their side, transparency, deep pixels, other separators, stray files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from own_files import CLASSES, table_rows, text_rows, write_csv, write_graph, write_images, write_texts
from test_own_data import counts, load, save_to_disk
from test_own_faults import refused

from profcil.config import OwnSettings
from profcil.data._pixels import ORIENTATION, read_image
from profcil.data.own import describe

# -- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image")


def test_a_photograph_is_turned_as_its_exif_data_says(tmp_path, pillow):
    left_is_white = np.zeros((16, 32), np.uint8)
    left_is_white[:, :8] = 255
    exif = pillow.Exif()
    exif[ORIENTATION] = 6  # to be shown after a quarter turn to the right: the left side is then at the top
    for suffix in (".jpg", ".png"):
        pillow.fromarray(left_is_white).save(tmp_path / f"a{suffix}", exif=exif)
        x = read_image(tmp_path / f"a{suffix}", (1, 32, 16))[0]
        assert int(x[:6].min()) > 200 and int(x[10:].max()) < 50


def test_turned_photographs_have_their_shown_size(tmp_path, pillow):
    exif = pillow.Exif()
    exif[ORIENTATION] = 8
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            pillow.new("RGB", (40, 20)).save(tmp_path / name / f"{i}.jpg", exif=exif)
    assert describe(tmp_path, OwnSettings()).shape == (3, 40, 20)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(tmp_path, pillow, mode):
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[4:, :, 3] = 255  # the lower half is black, the upper one transparent
    image = pillow.fromarray(rgba)
    if mode == "P":
        image = image.convert("RGBA").quantize(4)
    image.convert(mode).save(tmp_path / "a.png")
    x = read_image(tmp_path / "a.png", (3, 8, 8))
    assert int(x[:, :4].min()) == 255 and int(x[:, 4:].max()) == 0


def test_sixteen_bits_keep_their_upper_eight(tmp_path, pillow):
    deep = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    pillow.fromarray(deep).save(tmp_path / "a.png")
    assert torch.equal(read_image(tmp_path / "a.png", (1, 8, 8))[0], torch.from_numpy((deep >> 8).astype(np.uint8)))


def test_pixels_without_a_known_range_are_refused(tmp_path, pillow):
    write_images(tmp_path / "m")
    pillow.fromarray(np.ones((12, 12), np.float32)).save(tmp_path / "m" / "bee" / "x.tif")
    refused(tmp_path / "m", "x.tif cannot be read as an image (its pixels are floating-point numbers")


def test_images_below_a_class_folder_belong_to_it_and_stray_files_do_not_matter(tmp_path):
    write_images(tmp_path / "flat")
    write_images(tmp_path / "deep")
    for name in CLASSES:
        (tmp_path / "deep" / name / "more").mkdir()
        for file in sorted((tmp_path / "deep" / name).glob("*.png"))[:3]:
            file.rename(file.parent / "more" / file.name.upper())
    (tmp_path / "deep" / "__MACOSX").mkdir()
    (tmp_path / "deep" / "ant" / "._0.png").write_bytes(b"no image")
    (tmp_path / "deep" / "ant" / "Thumbs.db").write_bytes(b"no image")
    assert counts(load(tmp_path / "deep")) == counts(load(tmp_path / "flat"))


def test_names_of_parts_in_capitals(tmp_path):
    for part, each in (("Train", 5), ("Val", 2), ("TEST", 3)):
        write_images(tmp_path / part, each)
    assert counts(load(tmp_path)) == (20, 12, 8)


def test_images_outside_class_folders(tmp_path):
    write_images(tmp_path / "m", classes=["ant"])
    refused(tmp_path / "m" / "ant", "has images (0.png) outside class folders")


# -- files with rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_csv_with_another_separator_is_the_same_data(tmp_path, separator):
    rows = [(f"{text}, yes", label) for text, label in text_rows()]
    other = write_csv(tmp_path / "other.CSV", ("text", "label"), rows, separator)
    assert load(other).fingerprint == load(write_csv(tmp_path / "m.csv", ("text", "label"), rows)).fingerprint


def test_decimal_commas_are_numbers_where_semicolons_separate(tmp_path):
    rows = table_rows()
    header = (*"abcd", "label")
    commas = [[*(str(value).replace(".", ",") for value in row[:4]), row[4]] for row in rows]
    other = load(write_csv(tmp_path / "commas.csv", header, commas, ";"))
    assert other.fingerprint == load(write_csv(tmp_path / "points.csv", header, rows)).fingerprint
    assert not other.input_format.categories


def test_a_graph_with_semicolons(tmp_path):
    folder = write_graph(tmp_path / "m")
    expected = load(folder).fingerprint
    for name in ("nodes.csv", "edges.csv"):
        path = folder / name
        path.write_text(path.read_text().replace(",", ";"))
    assert load(folder).fingerprint == expected


def test_quotes_line_breaks_and_a_byte_order_mark(tmp_path):
    rows = [(f'{text}\nand "more", so', label) for text, label in text_rows()]
    plain = write_csv(tmp_path / "m.csv", ("text", "label"), rows)
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert load(plain).fingerprint == load(tmp_path / "bom.csv").fingerprint
    assert len(load(plain).train) == 32


def test_utf_16_is_named(tmp_path):
    path = write_texts(tmp_path / "m.csv")
    path.write_text(path.read_text(), encoding="utf-16")
    refused(path, "is not in the encoding utf-8", "own.encoding=utf-16")
    assert len(load(path, encoding="utf-16").train) == 32


def test_a_cell_without_a_text_has_no_words(tmp_path):
    rows = [{"text": text, "label": label} for text, label in text_rows()]
    rows[0]["text"] = None
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "none" not in load(tmp_path / "m.jsonl").input_format.words


def test_a_damaged_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "m.parquet").write_bytes(b"PAR1 no more")
    refused(tmp_path / "m.parquet", "cannot be read as Parquet")


NAMES = {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}


def save_part(folder: Path, labels: list[int]) -> None:
    texts = [f"{'up' if label else 'down'} {i}" for i, label in enumerate(labels)]
    save_to_disk(folder, {"text": texts, "label": labels}, NAMES)


def save_splits(folder: Path, **parts: list[int]) -> Path:
    for name, labels in parts.items():
        save_part(folder / name, labels)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))
    return folder


def test_a_part_without_labels_is_left_out_and_this_is_said(tmp_path):
    data = save_splits(tmp_path / "m", train=[0, 1] * 10, test=[-1] * 6, unsupervised=[-1] * 4)
    assert counts(load(data)) == (16, 4, 0)
    notes = describe(data, OwnSettings()).notes
    assert "unsupervised is not used" in notes[0] and "none of its rows has a label" in notes[1]


def test_a_row_without_a_class_is_no_example_of_the_last_class(tmp_path):
    refused(save_splits(tmp_path / "m", train=[0, 1, -1, 0]), "has no label in row 3")


def test_an_incomplete_dataset_of_hugging_face(tmp_path):
    data = save_splits(tmp_path / "m", train=[0, 1] * 4)
    (data / "train" / "data.arrow").unlink()
    refused(data, "is no complete dataset of Hugging Face")
