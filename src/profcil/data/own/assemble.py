"""Makes a Bundle of labelled inputs: numbers the classes, divides the examples into parts, and encodes the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from profcil.config import OwnSettings
from profcil.data._categories import HASHED, categories_of, is_categorical
from profcil.data._pixels import read_image
from profcil.data._tokens import FIRST, encode, vocabulary
from profcil.data.bundle import Bundle, Facts, Nodes, Rows
from profcil.data.input_format import SPLITTERS, InputFormat
from profcil.data.own.raw import DataSummary, Raw
from profcil.data.own.tasks import class_names, tasks_of
from profcil.errors import DataError
from profcil.randomness import generator

ENCODERS = {"image": "convnet", "text": "textcnn", "graph": "gat", "table": "perceptron"}
VIEWS = {"image": ("crop", "jitter"), "text": ("drop", "mask"), "graph": ("drop", "mask"), "table": ("noise", "mask")}
SPLITTER = "words"
SAMPLED_TEXTS = 2000  # for the default length
LONGEST = 256  # tokens
SHORTEST = 4
COVERED = 95  # percent of the texts that the default length does not cut
LARGE_TEXTS = 20_000  # training texts from which on more words get ids
WORDS = (8_000, 20_000)  # of fewer and of more texts

Ids = dict[str, np.ndarray]  # part -> numbers of its examples, ascending


def describe_raw(path: Path, raw: Raw, settings: OwnSettings) -> DataSummary:
    """What the defaults of a run depend on."""
    names = class_names(raw, settings, path)
    parts, notes = divided(raw, names, settings, 0, path)
    shape = raw.shape
    if raw.modality == "text":
        shape = (settings.length or default_length(raw.inputs),)
    elif isinstance(raw.inputs, dict):
        form = table_format(raw, parts["train"], path)
        shape = form.shape
        notes = (*notes, *category_notes(form))
    elif raw.modality in ("table", "graph"):
        shape = (raw.inputs.shape[1],)
    return DataSummary(path, raw.modality, names, len(parts["train"]), shape, (*raw.notes, *notes))


def bundle_of(path: Path, raw: Raw, settings: OwnSettings, seed: int) -> Bundle:
    """The data as a Bundle, whose tasks are given if the settings say more than their size."""
    names = class_names(raw, settings, path)
    parts, _ = divided(raw, names, settings, seed, path)
    facts = Facts(
        "own",
        f"Own data ({path.name})",
        raw.modality,
        len(names),
        None,
        None,
        views=VIEWS[raw.modality],
        encoder=ENCODERS[raw.modality],
        get="--data PATH",
    )
    build = BUILDERS[raw.modality]
    bundle = build(facts, raw, label_ids(raw, names), parts, names, settings)
    return replace(bundle, tasks=tasks_of(names, settings, seed))


def label_ids(raw: Raw, names: Sequence[str]) -> np.ndarray:
    ids = {name: i for i, name in enumerate(names)}
    return np.array([ids[label] for label in raw.labels], dtype=np.int64)


# -- parts ------------------------------------------------------------------------------------------------------------


def divided(
    raw: Raw, names: Sequence[str], settings: OwnSettings, seed: int, path: Path
) -> tuple[Ids, tuple[str, ...]]:
    """The examples of each part, and a note if a part stands in for another."""
    y = label_ids(raw, names)
    if not raw.parts:
        return drawn_parts(y, names, settings.test_share, seed, path), ()
    given = np.array(raw.parts)
    parts = {part: np.flatnonzero(given == part) for part in ("train", "validation", "test")}
    parts = {part: ids for part, ids in parts.items() if len(ids)}
    if "train" not in parts:
        raise DataError(f"{path} has no training part; name the parts train, val and test")
    check_trained(y[parts["train"]], names, path)
    if "test" in parts:
        return parts, ()
    if "validation" in parts:
        note = f"{path} has no test part; its validation part is tested on"
        return {"train": parts["train"], "test": parts["validation"]}, (note,)
    return drawn_parts(y, names, settings.test_share, seed, path), ()


def drawn_parts(y: np.ndarray, names: Sequence[str], share: float, seed: int, path: Path) -> Ids:
    """A seeded share of each class as the test part, at least one example, and at least one that is left."""
    is_test = np.zeros(len(y), dtype=bool)
    for label, name in enumerate(names):
        ids = np.flatnonzero(y == label)
        if len(ids) < 2:
            raise DataError(
                f"{path} has one example of class '{name}', one to train and one to test on are needed; add "
                "examples or remove the class"
            )
        drawn = generator(seed, "own", "split", name).permutation(ids)
        share_of_class = round(share * len(ids))
        count = min(max(1, share_of_class), len(ids) - 1)
        is_test[drawn[:count]] = True
    return {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}


def check_trained(y: np.ndarray, names: Sequence[str], path: Path) -> None:
    counts = np.bincount(y, minlength=len(names))
    if not counts.all():
        first = int(np.flatnonzero(counts == 0)[0])
        name = names[first]
        raise DataError(f"{path} has no training example of class '{name}'; add some, or remove the class")


# -- inputs -----------------------------------------------------------------------------------------------------------


def rows_bundle(facts: Facts, x: Tensor, y: np.ndarray, parts: Ids, names: Sequence[str], form: InputFormat) -> Bundle:
    """Independent examples as a Bundle."""
    labels = torch.from_numpy(y)
    rows: dict[str, Rows] = {}
    for part, ids in tensors(parts).items():
        rows[part] = Rows(x[ids], labels[ids])
    validation = rows.get("validation")
    return Bundle(facts, rows["train"], rows["test"], validation, tuple(names), form.vocabulary, input_format=form)


def tensors(parts: Ids) -> dict[str, Tensor]:
    return {part: torch.from_numpy(ids) for part, ids in parts.items()}


def text_bundle(
    facts: Facts, raw: Raw, y: np.ndarray, parts: Ids, names: Sequence[str], settings: OwnSettings
) -> Bundle:
    """Texts as token ids. The words are those of the training part, the most frequent ones."""
    split = SPLITTERS[SPLITTER]
    texts = [split(text) for text in raw.inputs]  # once for words and ids: splitting takes most of the time
    limit = settings.vocabulary or default_words(len(parts["train"]))
    words = tuple(vocabulary(texts[i] for i in parts["train"]))[:limit]
    length = settings.length or default_length(raw.inputs)
    form = InputFormat("text", (length,), splitter=SPLITTER, vocabulary=FIRST + len(words), words=words)
    return rows_bundle(facts, encode(texts, form.word_ids, length), y, parts, names, form)


def default_words(texts: int) -> int:
    return WORDS[1] if texts >= LARGE_TEXTS else WORDS[0]


def default_length(texts: Sequence[str]) -> int:
    """The number of tokens that most texts do not exceed, from a sample."""
    split = SPLITTERS[SPLITTER]
    step = max(1, len(texts) // SAMPLED_TEXTS)
    lengths = [len(split(text)) for text in texts[::step]]
    return int(np.clip(np.ceil(np.percentile(lengths, COVERED)), SHORTEST, LONGEST))


def image_bundle(
    facts: Facts, raw: Raw, y: np.ndarray, parts: Ids, names: Sequence[str], settings: OwnSettings
) -> Bundle:
    """Images as bytes in one size."""
    form = InputFormat("image", tuple(raw.shape))
    if isinstance(raw.inputs, np.ndarray):
        x = torch.from_numpy(raw.inputs)
    else:
        x = torch.empty(len(raw.inputs), *raw.shape, dtype=torch.uint8)
        for i, source in enumerate(raw.inputs):
            x[i] = read_image(source, raw.shape)
    return rows_bundle(facts, x, y, parts, names, form)


def table_bundle(
    facts: Facts, raw: Raw, y: np.ndarray, parts: Ids, names: Sequence[str], settings: OwnSettings
) -> Bundle:
    """Rows of numbers and categories. `load_bundle` adds the means and deviations of the training part."""
    if isinstance(raw.inputs, dict):
        form = table_format(raw, parts["train"], facts.title)
        return rows_bundle(facts, form.encode_columns(raw.inputs, facts.title), y, parts, names, form)
    form = InputFormat("table", (raw.inputs.shape[1],), columns=raw.columns)
    return rows_bundle(facts, torch.from_numpy(raw.inputs.astype(np.float32)), y, parts, names, form)


def table_format(raw: Raw, train: np.ndarray, where: object) -> InputFormat:
    """The form of a table with categories, whose values are those of the training part."""
    found = []
    width = 0
    for name in raw.columns:
        values = raw.inputs[name]
        if is_categorical(values):
            values_found = categories_of([values[i] for i in train], name, where)
            found.append((name, values_found))
            width += len(values_found) or HASHED
        else:
            width += 1
    return InputFormat("table", (width,), columns=raw.columns, categories=tuple(found))


def category_notes(form: InputFormat) -> list[str]:
    """How each column of categories is read."""
    how = [f"'{name}' ({len(values) or f'hashed into {HASHED}'})" for name, values in form.categories]
    return [f"columns of categories, and the number of columns that each becomes: {', '.join(how)}"]


def graph_bundle(
    facts: Facts, raw: Raw, y: np.ndarray, parts: Ids, names: Sequence[str], settings: OwnSettings
) -> Bundle:
    """Nodes of one graph, which all parts share."""
    assert raw.edges is not None and raw.nodes is not None
    x = torch.from_numpy(np.ascontiguousarray(raw.inputs, dtype=np.float32))
    edges = torch.from_numpy(raw.edges)
    nodes = torch.from_numpy(raw.nodes)
    labels = torch.from_numpy(y)
    found = {}
    for part, ids in tensors(parts).items():
        found[part] = Nodes(x, edges, labels[ids], nodes[ids])
    form = InputFormat("graph", (x.shape[1],), columns=raw.columns)
    validation = found.get("validation")
    return Bundle(facts, found["train"], found["test"], validation, tuple(names), input_format=form)


BUILDERS: dict[str, Callable[..., Bundle]] = {
    "image": image_bundle,
    "text": text_bundle,
    "graph": graph_bundle,
    "table": table_bundle,
}
