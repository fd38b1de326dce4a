"""CLINC150: short requests to an assistant with 150 intents. Tokens are words. The out-of-scope parts are not used."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from profcil.data import files
from profcil.data._tokens import FIRST, encode, vocabulary
from profcil.data.bundle import Bundle, Facts, File, Rows
from profcil.data.input_format import SPLITTERS, InputFormat

LENGTH = 32  # tokens per request
PARTS = ("train", "val", "test")
FACTS = Facts(
    name="clinc150",
    title="CLINC150",
    modality="text",
    classes=150,
    train=15_000,
    test=4_500,
    files=(
        File(
            "data_full.json",
            size=2_495_390,
            sha256="36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
            url="https://raw.githubusercontent.com/clinc/oos-eval/master/data/data_full.json",
        ),
    ),
    views=("drop", "mask"),
    encoder="textcnn",
    homepage="https://github.com/clinc/oos-eval",
    licence="CC BY 3.0",
    get="copy data/data_full.json of https://github.com/clinc/oos-eval there",
)
Request = tuple[list[str], str]  # words, intent


def load(root: Path, seed: int = 0) -> Bundle:
    """Requests as word ids. The split is the official one, so `seed` is not used."""
    path = files.locate(FACTS, root, "data_full.json")
    train, val, test = read(path)
    intents = sorted({intent for _, intent in train})
    labels = {intent: label for label, intent in enumerate(intents)}
    ids = vocabulary(words for words, _ in train)
    try:
        train_rows = rows(train, ids, labels)
        val_rows = rows(val, ids, labels)
        test_rows = rows(test, ids, labels)
    except KeyError as error:
        raise files.damaged(FACTS, path, f"has the intent {error} outside its training part") from error
    size = FIRST + len(ids)
    form = InputFormat("text", (LENGTH,), splitter="latin_words", vocabulary=size, words=tuple(ids))
    return Bundle(FACTS, train_rows, test_rows, val_rows, tuple(intents), vocabulary=size, input_format=form)


def read(path: Path) -> list[list[Request]]:
    """The words and the intent of every request, one list per part."""
    try:
        content = json.loads(path.read_text("utf-8"))
        return [parse(content[part]) for part in PARTS]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.damaged(FACTS, path, f"does not contain the parts train, val and test ({error})") from error


def parse(requests: list[tuple[str, str]]) -> list[Request]:
    """Split each request into lower-case words."""
    split = SPLITTERS["latin_words"]
    return [(list(split(text)), intent) for text, intent in requests]


def rows(requests: list[Request], ids: dict[str, int], labels: dict[str, int]) -> Rows:
    """Token ids and labels of one part."""
    x = encode([words for words, _ in requests], ids, LENGTH)
    y = torch.tensor([labels[intent] for _, intent in requests])
    return Rows(x, y)
