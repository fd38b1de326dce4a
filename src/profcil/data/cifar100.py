"""CIFAR-100, read from its official binary or Python files. Class ids are the fine labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from profcil.data import files, unpickle
from profcil.data.bundle import Bundle, Facts, File, Rows

BINARY = "cifar-100-binary"
PYTHON = "cifar-100-python"
SITE = "https://www.cs.toronto.edu/~kriz"
SHAPE = (3, 32, 32)
RECORD = 2 + 3 * 32 * 32  # bytes of one image: coarse label, fine label, pixels
FACTS = Facts(
    name="cifar100",
    title="CIFAR-100",
    modality="image",
    classes=100,
    train=50_000,
    test=10_000,
    files=(
        File(
            f"{BINARY}.tar.gz",
            size=168_513_733,
            md5="03b5dce01913d631647c71ecec9e9cb8",
            url=f"{SITE}/{BINARY}.tar.gz",
            archive=True,
            layout="binary",
        ),
        File(f"{BINARY}/train.bin", 50_000 * RECORD, sha1="e207cd2e05b73b1393c74c7f5e7bea451d63e08e", layout="binary"),
        File(f"{BINARY}/test.bin", 10_000 * RECORD, sha1="8fb6623e830365ff53cf14adec797474f5478006", layout="binary"),
        File(
            f"{PYTHON}.tar.gz",
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            url=f"{SITE}/{PYTHON}.tar.gz",
            archive=True,
            layout="python",
        ),
        File(f"{PYTHON}/train", md5="16019d7e3df5f24257cddd939b257f8d", layout="python"),
        File(f"{PYTHON}/test", md5="f0ef6b0ae62326f3e7ffdfab6717acfc", layout="python"),
    ),
    views=("crop", "flip", "jitter"),
    encoder="resnet18",
    homepage=f"{SITE}/cifar.html",
    licence="free for research; cite Krizhevsky (2009)",
    get=f"unpack {BINARY}.tar.gz or {PYTHON}.tar.gz from {SITE}/cifar.html there",
)


def load(root: Path, seed: int = 0) -> Bundle:
    """Training and test images from either layout. The split is the official one, so `seed` is not used."""
    return Bundle(FACTS, part(root, "train"), part(root, "test"), None, class_names(root))


def part(root: Path, name: str) -> Rows:
    """One official part. The binary layout is preferred because it needs no unpickling."""
    binary = files.find(FACTS, root, f"{BINARY}/{name}.bin")
    pickled = files.find(FACTS, root, f"{PYTHON}/{name}")
    if binary is not None:
        return read_binary(binary)
    if pickled is not None and pickled.is_file():
        return read_python(pickled)
    raise files.missing(FACTS, root, f"{BINARY}/{name}.bin")


def read_binary(path: Path) -> Rows:
    """The images of a binary file."""
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) % RECORD:
        raise files.damaged(FACTS, path, f"has {len(raw)} bytes, which is not a multiple of the record size {RECORD}")
    records = raw.reshape(-1, RECORD)
    return rows(records[:, 2:], records[:, 1])


def read_python(path: Path) -> Rows:
    """The images of a Python file: a pickled dictionary with `data` and `fine_labels`."""
    content = unpickle.load(path)
    try:
        pixels = unpickle.array(content["data"])
        if pixels.dtype != np.uint8:
            raise ValueError(f"`data` has the type {pixels.dtype}, not uint8")
        return rows(pixels, unpickle.integers(content["fine_labels"]))
    except (KeyError, TypeError, ValueError) as error:
        raise files.damaged(FACTS, path, f"does not contain `data` and `fine_labels` ({error})") from error


def rows(pixels: np.ndarray, labels: np.ndarray) -> Rows:
    """Images [n, 3, 32, 32] from flat pixels, with int64 labels."""
    x = torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, *SHAPE))
    return Rows(x, torch.from_numpy(labels.astype(np.int64)))


def class_names(root: Path) -> tuple[str, ...]:
    """The names of the fine labels, or "class N" if the official files with the names are missing."""
    listed = files.find(FACTS, root, f"{BINARY}/fine_label_names.txt")
    meta = files.find(FACTS, root, f"{PYTHON}/meta")
    if listed is not None:
        return tuple(listed.read_text("utf-8").split())
    if meta is not None:
        return meta_names(meta)
    return tuple(f"class {label}" for label in range(FACTS.classes))


def meta_names(path: Path) -> tuple[str, ...]:
    """The names of the fine labels in a pickled `meta` file."""
    content = unpickle.load(path)
    try:
        names = content["fine_label_names"]
        are_texts = type(names) is list and all(type(name) is str for name in names)
        if not are_texts:
            raise TypeError("the names are not texts")
        return tuple(names)
    except (KeyError, TypeError) as error:
        raise files.damaged(FACTS, path, "does not contain `fine_label_names`") from error
