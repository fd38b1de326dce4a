"""How raw inputs become the tensors of a dataset: texts to token ids, image files to pixels.

A Bundle holds the format of its inputs, and a saved model holds it too. So a model can read new inputs without the data
that it was trained on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.data._categories import one_hot
from profcil.data._numbers import number_columns
from profcil.data._pixels import read_image
from profcil.data._tokens import FIRST, UNKNOWN, encode
from profcil.errors import DataError

LATIN_WORD = re.compile(r"[a-z0-9']+")
WORD_OR_CHARACTER = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")  # a Chinese character, or a word of any script

# The ways to split a text, by the name that is stored.
SPLITTERS: Mapping[str, Callable[[str], Sequence[str]]] = {
    "latin_words": lambda text: LATIN_WORD.findall(text.lower()),
    "characters": lambda text: text.strip(),
    "words": lambda text: WORD_OR_CHARACTER.findall(text.lower()),
}


@dataclass(frozen=True)
class InputFormat:
    """The form of one input, and how a raw one is brought into it."""

    modality: str  # as in Facts
    shape: tuple[int, ...]  # of one input: channels, height, width; or tokens; or features of a node or row
    splitter: str = ""  # texts: a name of SPLITTERS
    vocabulary: int = 0  # texts: the number of token ids, including padding
    words: tuple[str, ...] = ()  # texts: the tokens in the order of their ids; empty = ids are hashes
    columns: tuple[str, ...] = ()  # tables and graphs: the names of the features, where they have names
    # tables: the columns of categories, and the values of each; without values it is hashed
    categories: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def word_ids(self) -> dict[str, int]:
        return {word: FIRST + rank for rank, word in enumerate(self.words)}

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """The token ids of texts, [texts, length]."""
        split = SPLITTERS[self.splitter]
        (length,) = self.shape
        if self.words:
            return encode([split(text) for text in texts], self.word_ids, length)
        rows = [self.hashed_ids(split(text), length) for text in texts]
        return torch.tensor(rows, dtype=torch.long).reshape(-1, length)

    def hashed_ids(self, words: Sequence[str], length: int) -> list[int]:
        """The hashed ids of a text's words, padded with 0. A text without words becomes one unknown token."""
        ids = [hashed_id(word, self.vocabulary) for word in words[:length]] or [UNKNOWN]
        return ids + [0] * (length - len(ids))

    def read_image(self, path: Path | bytes) -> Tensor:
        """The pixels of an image file or of its content, uint8 [channels, height, width]. Another size is resized."""
        return read_image(path, self.shape)

    def encode_columns(self, columns: Mapping[str, Sequence[Any]], where: object) -> Tensor:
        """Rows of a table from its columns by name, float32 [rows, columns]. `where` names their file in a message."""
        for name in self.columns:
            if name not in columns:
                raise DataError(f"{where} has no column '{name}', which the model was trained on; add it")
        if not self.categories:
            return torch.from_numpy(number_columns(columns, self.columns, where).astype(np.float32))
        categories = dict(self.categories)
        parts = []
        for name in self.columns:
            if name in categories:
                parts.append(one_hot(columns[name], categories[name]))
            else:
                parts.append(number_columns(columns, [name], where))
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """The format as JSON values, without fields that are empty."""
        return {name: value for name, value in asdict(self).items() if value}


def input_format_of_json(values: Mapping[str, Any]) -> InputFormat:
    """The format from what `to_json` gave and JSON stored."""
    known = {field.name for field in fields(InputFormat)}
    unknown = set(values) - known
    if unknown or not {"modality", "shape"} <= set(values):
        raise DataError("the format of the inputs cannot be read; it was written by another version of profcil")
    tuples: dict[str, Any] = {}
    for name, value in values.items():
        tuples[name] = tuple(value) if isinstance(value, list) else value
    if "categories" in tuples:
        tuples["categories"] = tuple((name, tuple(found)) for name, found in tuples["categories"])
    return InputFormat(**tuples)


def hashed_id(word: str, vocabulary: int) -> int:
    """A word's token id. It is the same at every site, and no vocabulary has to be exchanged."""
    value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
    return FIRST + value % (vocabulary - FIRST)
