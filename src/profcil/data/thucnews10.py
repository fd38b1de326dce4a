"""THUCNews-10: Chinese news titles in ten categories. Tokens are characters.

Each line is `title<TAB>label`. A partial copy can be loaded; `profcil data verify` reports what is missing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from profcil.data import files
from profcil.data._tokens import FIRST, encode, vocabulary
from profcil.data.bundle import Bundle, Facts, File, Rows
from profcil.data.input_format import InputFormat

SITE = "https://github.com/649453932/Chinese-Text-Classification-Pytorch"
RAW = "https://raw.githubusercontent.com/649453932/Chinese-Text-Classification-Pytorch/master/THUCNews/data"
LENGTH = 32  # characters per title; few titles are longer
PARTIAL = True  # fewer examples than the official dataset are allowed
FACTS = Facts(
    name="thucnews10",
    title="THUCNews-10",
    modality="text",
    classes=10,
    train=180_000,
    test=10_000,
    files=tuple(File(name, url=f"{RAW}/{name}") for name in ("train.txt", "dev.txt", "test.txt", "class.txt")),
    views=("drop", "mask"),
    encoder="textcnn",
    homepage=SITE,
    licence="THUCTC terms: free for research",
    get=f"copy train.txt, dev.txt, test.txt and class.txt from {SITE} there",
)
Lines = tuple[list[str], list[int]]  # titles, labels


def load(root: Path, seed: int = 0) -> Bundle:
    """Titles as character ids. The split is the official one, so `seed` is not used."""
    train = read(files.locate(FACTS, root, "train.txt"))
    dev = read(files.locate(FACTS, root, "dev.txt"))
    test = read(files.locate(FACTS, root, "test.txt"))
    titles, _ = train
    ids = vocabulary(titles)
    names = tuple(files.locate(FACTS, root, "class.txt").read_text("utf-8").split())
    size = FIRST + len(ids)
    form = InputFormat("text", (LENGTH,), splitter="characters", vocabulary=size, words=tuple(ids))
    train_rows = rows(train, ids)
    dev_rows = rows(dev, ids)
    test_rows = rows(test, ids)
    return Bundle(FACTS, train_rows, test_rows, dev_rows, names, vocabulary=size, input_format=form)


def rows(lines: Lines, ids: dict[str, int]) -> Rows:
    titles, labels = lines
    return Rows(encode(titles, ids, LENGTH), torch.tensor(labels))


def counts(root: Path) -> tuple[int, int]:
    """The numbers of training and test titles."""
    _, train = read(files.locate(FACTS, root, "train.txt"))
    _, test = read(files.locate(FACTS, root, "test.txt"))
    return len(train), len(test)


def read(path: Path) -> Lines:
    """The titles and labels of one file."""
    titles: list[str] = []
    labels: list[int] = []
    try:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                title, label = line.rstrip("\r\n").rsplit("\t", 1)
                titles.append(title.strip())
                labels.append(int(label))
    except UnicodeDecodeError as error:
        raise files.damaged(FACTS, path, f"is not UTF-8 text ({error.reason})") from error
    except ValueError as error:
        raise files.damaged(FACTS, path, f"has no title<TAB>label in line {len(labels) + 1}") from error
    return titles, labels
