"""Texts as rows of token ids: 0 is padding, 1 is a token the training text does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

UNKNOWN = 1
FIRST = 2


def vocabulary(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Token ids by falling frequency, ties by the token itself, so that the order of the texts does not matter."""
    counts = Counter(token for text in texts for token in text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return {token: FIRST + rank for rank, token in enumerate(ranked)}


def encode(texts: Sequence[Sequence[str]], ids: dict[str, int], length: int) -> Tensor:
    """Token ids [n, length], cut or padded; a text without tokens is one unknown, so that no row is all padding."""
    rows = [[ids.get(token, UNKNOWN) for token in text[:length]] or [UNKNOWN] for text in texts]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.long).reshape(-1, length)
