from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import official
import pytest
import torch

from profcil.data import cifar100, digits, loading, tinyimagenet
from profcil.errors import DataError


@pytest.fixture
def small_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the fact tables by those of the tiny copies."""
    without_checksums = tuple(replace(f, size=None, sha1=None, md5=None) for f in cifar100.FACTS.files)
    monkeypatch.setattr(cifar100, "FACTS", replace(cifar100.FACTS, classes=3, train=6, test=4, files=without_checksums))
    monkeypatch.setattr(tinyimagenet, "FACTS", replace(tinyimagenet.FACTS, classes=2, train=4, test=2))


def test_digits_need_no_files_and_are_split_by_class() -> None:
    one, same, other = (loading.load_bundle("digits", Path("nowhere"), seed) for seed in (0, 0, 1))
    assert (one.train.x.dtype, one.train.x.shape[1:]) == (torch.uint8, (1, 8, 8))
    assert one.train.x.max() == 255
    assert (len(one.train), len(one.test)) == (digits.FACTS.train, digits.FACTS.test)
    assert torch.bincount(one.test.y).min() >= 35
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_image_statistics_are_computed_from_the_pixels() -> None:
    bundle = loading.load_bundle("digits", Path("nowhere"))
    scaled = bundle.train.x.double() / 255
    assert bundle.mean == pytest.approx([scaled.mean().item()])
    assert bundle.std == pytest.approx([scaled.std(unbiased=False).item()])


@pytest.mark.parametrize("place", ["cifar100/cifar-100-binary", "cifar100", "cifar-100-binary"])
def test_cifar_binary_is_found_where_users_unpack_it(small_facts: None, tmp_path: Path, place: str) -> None:
    official.cifar_binary(tmp_path / place)
    bundle = loading.load_bundle("cifar100", tmp_path)
    assert bundle.train.y.tolist() == [0, 1, 2, 0, 1, 2]  # the fine label, not the coarse 19
    assert bundle.train.x[5, :, 0, 0].tolist() == [5, 55, 105]  # channels first
    assert bundle.names == ("class 0", "class 1", "class 2")


def test_cifar_python_equals_binary(small_facts: None, tmp_path: Path) -> None:
    official.cifar_binary(tmp_path / "a/cifar100")
    official.cifar_python(tmp_path / "b/cifar100/cifar-100-python")
    a, b = (loading.load_bundle("cifar100", tmp_path / name) for name in "ab")
    assert a.fingerprint == b.fingerprint
    assert b.names == ("fish 0", "fish 1", "fish 2")


def test_the_error_for_missing_cifar_files_says_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.bin was not found; looked in .* and .*profcil data fetch cifar100"):
        cifar100.load(tmp_path)


def test_cifar_files_with_wrong_length_count_or_labels_are_refused(small_facts: None, tmp_path: Path) -> None:
    official.cifar_binary(tmp_path / "cifar100")
    train = tmp_path / "cifar100/train.bin"
    original = train.read_bytes()
    for content, message in (
        (original[:-1], "not a multiple"),
        (original[:-3074], "5 training examples where the official dataset has 6"),
        (b"\x00\x07" + original[2:], "labels from 0 to 7"),
    ):
        train.write_bytes(content)
        with pytest.raises(DataError, match=message):
            loading.load_bundle("cifar100", tmp_path)


def test_tinyimagenet_classes_follow_wnids_and_val_is_the_test_part(small_facts: None, tmp_path: Path) -> None:
    official.tiny_imagenet(tmp_path / "tinyimagenet/tiny-imagenet-200")
    bundle = loading.load_bundle("tinyimagenet", tmp_path)
    assert bundle.names == ("cat", "goldfish")
    assert bundle.train.y.tolist() == [0, 0, 1, 1]
    assert bundle.test.y.tolist() == [0, 1]  # the annotated image that does not exist is left out
    assert bundle.train.x.shape == (4, 3, 64, 64)
    assert bundle.train.x[:, 0, 0, 0].tolist() == pytest.approx([20, 20, 120, 120], abs=2)


def test_tinyimagenet_is_decoded_once(small_facts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.tiny_imagenet(tmp_path / "tinyimagenet")
    first = loading.load_bundle("tinyimagenet", tmp_path)
    monkeypatch.setattr(tinyimagenet, "decode", lambda *_: pytest.fail("decoded again"))
    assert loading.load_bundle("tinyimagenet", tmp_path).fingerprint == first.fingerprint


def test_a_partial_tinyimagenet_loads_but_is_not_complete(small_facts: None, tmp_path: Path) -> None:
    official.tiny_imagenet(tmp_path / "tinyimagenet", each=1)
    assert len(loading.load_bundle("tinyimagenet", tmp_path).train) == 2
    assert loading.verify(tmp_path, "tinyimagenet") == [
        "TinyImageNet has 2 training examples where the official dataset has 4"
    ]
    row = next(row for row in loading.status(tmp_path) if row["dataset"] == "tinyimagenet")
    assert row["present"] and not row["complete"]


def test_the_error_names_a_damaged_tinyimagenet_image(small_facts: None, tmp_path: Path) -> None:
    official.tiny_imagenet(tmp_path / "tinyimagenet")
    (tmp_path / "tinyimagenet/train/n01/images/n01_1.JPEG").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"n01_1\.JPEG"):
        tinyimagenet.load(tmp_path)


def test_held_out_digits_are_a_fifth_of_each_class() -> None:
    labels = np.repeat(np.arange(10), 20)
    assert np.bincount(labels[digits.held_out(labels, 3)]).tolist() == [4] * 10
