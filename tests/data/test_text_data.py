from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import official
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.data import clinc150, loading, thucnews10
from profcil.data._tokens import encode, vocabulary
from profcil.errors import DataError


@pytest.fixture(autouse=True)
def small_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the fact tables by those of the tiny copies."""
    monkeypatch.setattr(thucnews10, "FACTS", replace(thucnews10.FACTS, classes=2, train=3, test=2))
    without_checksum = (replace(clinc150.FACTS.files[0], size=None, sha256=None),)
    monkeypatch.setattr(clinc150, "FACTS", replace(clinc150.FACTS, classes=2, train=3, test=1, files=without_checksum))


def test_thucnews_vocabulary_is_of_the_training_text_only(tmp_path: Path) -> None:
    official.thucnews(tmp_path / "thucnews10")
    bundle = loading.load_bundle("thucnews10", tmp_path)
    assert bundle.names == ("finance", "sports")
    assert bundle.vocabulary == 2 + 5  # padding, unknown, and 股市票球赛
    assert bundle.train.x.shape == (3, 32)
    assert bundle.train.x[2].tolist() == [2] * 32  # the most frequent character, cut to length
    assert bundle.test.x[0, 1:3].tolist() == [1, 0]  # unknown, then padding
    assert bundle.test.x[1, 0] == 1  # an empty title is not all padding
    assert len(bundle.validation) == 1


@pytest.mark.parametrize("content", [b"no label\n", "标题\tx\n".encode(), b"\xff\xfe\t1\n"])
def test_thucnews_damaged_lines_are_refused(tmp_path: Path, content: bytes) -> None:
    official.thucnews(tmp_path / "thucnews10")
    (tmp_path / "thucnews10/train.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.txt"):
        thucnews10.load(tmp_path)


def test_thucnews_label_out_of_range_is_refused(tmp_path: Path) -> None:
    official.thucnews(tmp_path / "thucnews10")
    (tmp_path / "thucnews10/dev.txt").write_text("股票\t2\n", "utf-8")
    with pytest.raises(DataError, match="validation part has labels from 2 to 2 where 0 to 1"):
        loading.load_bundle("thucnews10", tmp_path)


def test_thucnews_may_have_fewer_examples_but_not_more(tmp_path: Path) -> None:
    official.thucnews(tmp_path / "thucnews10")
    train = tmp_path / "thucnews10/train.txt"
    lines = train.read_text("utf-8")
    train.write_text(lines.split("\n")[0] + "\n", "utf-8")
    assert len(loading.load_bundle("thucnews10", tmp_path).train) == 1
    train.write_text(lines + lines, "utf-8")
    with pytest.raises(DataError, match="6 training examples"):
        loading.load_bundle("thucnews10", tmp_path)


def test_clinc_sorts_intents_and_ignores_out_of_scope(tmp_path: Path) -> None:
    official.clinc(tmp_path / "clinc150")
    bundle = loading.load_bundle("clinc150", tmp_path)
    assert bundle.names == ("balance", "music")
    assert bundle.train.y.tolist() == [0, 1, 1]
    assert bundle.vocabulary == 2 + 6  # what's my balance play a song
    assert bundle.train.x[2, :3].tolist() == [2, 2, 0]  # play, the most frequent word, twice
    assert bundle.test.x[0, 0] == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"train": []}', '{"train": [["a"]], "val": [], "test": []}'])
def test_clinc_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    official.clinc(tmp_path / "clinc150")
    (tmp_path / "clinc150/data_full.json").write_text(content)
    with pytest.raises(DataError, match=r"data_full\.json"):
        clinc150.load(tmp_path)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("abcd", max_size=6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_vocabulary_ignores_order_and_encoding_keeps_tokens(texts: list[str], random) -> None:
    ids = vocabulary(texts)
    shuffled = list(texts)
    random.shuffle(shuffled)
    assert vocabulary(shuffled) == ids
    assert sorted(ids.values()) == list(range(2, 2 + len(ids)))
    back = {v: k for k, v in ids.items()}
    for text, row in zip(texts, encode(texts, ids, 4).tolist(), strict=True):
        assert "".join(back.get(t, "") for t in row) == text[:4]
        assert row[0] != 0


def test_class_names_that_are_not_utf8_are_one_sentence(tmp_path: Path) -> None:
    official.thucnews(tmp_path / "thucnews10")
    (tmp_path / "thucnews10/class.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match="THUCNews-10's files cannot be read") as raised:
        loading.load_bundle("thucnews10", tmp_path)
    assert "\n" not in str(raised.value)


def test_deeply_nested_json_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150/data_full.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"data_full\.json"):
        loading.load_bundle("clinc150", tmp_path)
