"""A dictionary of texts that no data has influenced: words and pairs of adjacent words, hashed into columns.

Nothing is counted, so nothing is sent and no entry reveals anything. N-grams that share a column cannot be told apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.model.dictionary.text import MULTIPLIER, SHIFT, ngrams

CHUNK = 1024  # texts at a time


class HashedDictionary:
    """Presence of words and pairs in `width` columns."""

    rounds = 0
    usable_untrained = True

    def __init__(self, width: int, vocabulary: int, min_support: int = 1) -> None:
        self.width = width
        self.vocabulary = vocabulary
        self.min_support = max(min_support, 1)

    def begin(self, rng: torch.Generator) -> dict[str, Tensor]:
        """The number of columns. Nothing is drawn."""
        return {"columns": torch.tensor([self.width])}

    def sums(self, entries: dict[str, Tensor], inputs: Inputs, round: int) -> dict[str, Tensor]:
        """Nothing: there is no round."""
        return {}

    def update(self, entries: dict[str, Tensor], sums: dict[str, Tensor], round: int) -> dict[str, Tensor]:
        return entries

    def features(self, entries: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The columns of each text's n-grams, at unit length, [texts, width]."""
        (tokens,) = inputs
        if torch.compiler.is_exporting():  # the number of chunks depends on the number of texts
            return self.present(tokens)
        return torch.cat([self.present(part) for part in tokens.split(CHUNK)])

    def present(self, tokens: Tensor) -> Tensor:
        """The columns of some texts."""
        ids = ngrams(tokens, self.vocabulary)
        hashed = ((ids * MULTIPLIER) >> SHIFT) % self.width
        column = hashed.where(ids >= 0, self.width)
        present = tokens.new_zeros(tokens.shape[0], self.width + 1, dtype=torch.float32)
        present.scatter_(1, column, 1.0)  # the last column is for places without an n-gram
        present = present[:, : self.width]
        number = present.sum(1, keepdim=True)
        return present / number.clamp(min=1).sqrt()
