"""The format of inputs: it reads raw inputs as the loader did, and survives being stored."""

from __future__ import annotations

import json

import pytest
import torch

from profcil.data.input_format import InputFormat, input_format_of_json
from profcil.errors import DataError

WORDS = InputFormat("text", (4,), splitter="latin_words", vocabulary=5, words=("the", "cat", "sat"))
HASHES = InputFormat("text", (4,), splitter="words", vocabulary=500)


def test_known_words_have_their_rank_and_others_are_unknown():
    assert WORDS.encode_texts(["The dog sat", ""]).tolist() == [[2, 1, 4, 0], [1, 0, 0, 0]]


def test_characters_are_the_tokens_of_a_chinese_title():
    form = InputFormat("text", (3,), splitter="characters", vocabulary=4, words=("咳", "嗽"))
    assert form.encode_texts([" 嗽咳咳咳 "]).tolist() == [[3, 2, 2]]


@pytest.mark.parametrize("form", [WORDS, HASHES, InputFormat("image", (3, 8, 8))])
def test_a_stored_format_is_the_same(form):
    assert input_format_of_json(json.loads(json.dumps(form.to_json()))) == form


@pytest.mark.parametrize("values", [{"modality": "text"}, {"modality": "text", "shape": [3], "pieces": 1}])
def test_a_format_of_another_version_is_refused(values):
    with pytest.raises(DataError, match="another version"):
        input_format_of_json(values)


def test_an_image_file_is_resized(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (10, 6), (255, 0, 0)).save(tmp_path / "a.png")
    pixels = InputFormat("image", (3, 4, 4)).read_image(tmp_path / "a.png")
    assert pixels.dtype == torch.uint8
    assert pixels.flatten(1).tolist() == [[255] * 16, [0] * 16, [0] * 16]
