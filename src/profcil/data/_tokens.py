"""Texts as rows of token ids. Id 0 is padding, id 1 is any token that the training text does not contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

UNKNOWN = 1
FIRST = 2  # the id of the most frequent token


def vocabulary(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Token ids by falling frequency. Ties are broken by the token, so the order of the texts does not matter."""
    counts = Counter(token for text in texts for token in text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return {token: FIRST + rank for rank, token in enumerate(ranked)}


def encode(texts: Sequence[Sequence[str]], ids: dict[str, int], length: int) -> Tensor:
    """Token ids [n, length], each text cut or padded to the length."""
    rows = [encode_text(text, ids, length) for text in texts]
    return torch.tensor(rows, dtype=torch.long).reshape(-1, length)


def encode_text(text: Sequence[str], ids: dict[str, int], length: int) -> list[int]:
    """The token ids of one text. An empty text becomes one unknown token, so that no row is all padding."""
    known = [ids.get(token, UNKNOWN) for token in text[:length]]
    row = known or [UNKNOWN]
    return row + [0] * (length - len(row))
