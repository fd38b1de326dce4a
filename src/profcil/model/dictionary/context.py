"""A dictionary of texts with few examples a class: words, and the words that stand beside them.

The clients count how often each word stands directly before and directly after each of the most frequent words, its
contexts. The server adds the counts. The row of a word is the positive pointwise mutual information with its contexts,
scaled to unit length: words that are used alike have similar rows, also if one of them is rare. A text is represented
by rectified random projections of three parts: its words, the rows of its words, and its pairs of adjacent words. The
directions are drawn from one seed and not sent. That of a pair is the product of those of its words, so pairs need no
counts.

A row reveals which frequent words occur beside a word, each at least `min_support` times among all clients. The counts
of one client reveal the same of its own texts. A deployment should add secure summation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.model.dictionary.text import UNKNOWN
from profcil.randomness import torch_generator

CONTEXTS = 500  # ids are by falling frequency, so the first ones are the most frequent words
SMOOTHING = 0.75  # exponent of the contexts' counts (Levy et al., 2015)
WEIGHTS = (1.0, 1.0, 0.4)  # of words, rows and pairs
CHUNK = 128  # texts at a time


class ContextDictionary:
    """Rectified projections of words, contexts and pairs."""

    rounds = 1
    usable_untrained = True  # words and pairs without their contexts

    def __init__(self, width: int, vocabulary: int, min_support: int = 1) -> None:
        self.width = width
        self.vocabulary = vocabulary
        self.min_support = max(min_support, 1)
        words = max(vocabulary - UNKNOWN - 1, 0)
        self.contexts = min(CONTEXTS, words)

    def begin(self, rng: torch.Generator) -> dict[str, Tensor]:
        """Rows without contexts. Nothing is drawn."""
        return {"contexts": torch.zeros(self.vocabulary, 2 * self.contexts)}

    def sums(self, entries: dict[str, Tensor], inputs: Inputs, round: int) -> dict[str, Tensor]:
        """How often each word stands before and after each context, [2, vocabulary, contexts]."""
        (tokens,) = inputs
        first = tokens[:, :-1]
        second = tokens[:, 1:]
        before = self.count(first, second)
        after = self.count(second, first)
        return {"beside": torch.stack([before, after])}

    def count(self, words: Tensor, others: Tensor) -> Tensor:
        """How often each word is paired with each context."""
        column = others - UNKNOWN - 1
        is_context = (column >= 0) & (column < self.contexts)
        real = (words > UNKNOWN) & is_context
        cell = words * self.contexts + column
        size = self.vocabulary * self.contexts
        flat = torch.bincount(cell[real], minlength=size)
        return flat.int().view(self.vocabulary, self.contexts)

    def update(self, entries: dict[str, Tensor], sums: dict[str, Tensor], round: int) -> dict[str, Tensor]:
        """The rows of all words."""
        sides = [mutual_information(side.double(), self.min_support) for side in sums["beside"]]
        rows = F.normalize(torch.cat(sides, 1), dim=1)
        return {"contexts": rows.float()}

    def features(self, entries: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Rectified projections of each text, [texts, width]."""
        (tokens,) = inputs
        if torch.compiler.is_exporting():  # the number of chunks depends on the number of texts
            return self.project(entries["contexts"], tokens).relu()
        parts = [self.project(entries["contexts"], part) for part in tokens.split(CHUNK)]
        return torch.cat(parts).relu()

    def project(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The weighted sum of the three parts, each scaled to unit mean square."""
        contexts = sum_of_rows(rows, tokens)
        columns = rows.shape[1]
        contexts = contexts @ directions(columns, self.width, tokens.device)
        words, pairs = self.words_and_pairs(tokens)
        parts = zip(WEIGHTS, (words, contexts, pairs), strict=True)
        weighted = [weight * unit_mean_square(part) for weight, part in parts]
        return torch.stack(weighted).sum(0)

    def words_and_pairs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the directions of words and of pairs, one place in the texts after another."""
        table = word_directions(self.vocabulary, self.width, tokens.device)
        words = pairs = last = table.new_zeros(tokens.shape[0], self.width)
        if not torch.compiler.is_exporting():  # padding adds nothing, and its number depends on the texts
            tokens = tokens[:, (tokens > 0).any(0)]
        for place in tokens.T:
            word = table[place]
            words = words + word
            pairs = pairs + last * word.roll(1, 1)
            last = word
        return words, pairs


def sum_of_rows(rows: Tensor, tokens: Tensor) -> Tensor:
    """The sum of the rows of each text's words; padding has none."""
    if torch.compiler.is_exporting():  # ONNX has no sum over bags
        is_word = (tokens > 0)[..., None]
        return (rows[tokens] * is_word).sum(1)
    return F.embedding_bag(tokens, rows, mode="sum", padding_idx=0)


def mutual_information(counts: Tensor, min_support: int) -> Tensor:
    """The positive pointwise mutual information of rows and columns; 0 for counts below `min_support`."""
    rows = counts.sum(1, keepdim=True).clamp(min=1)
    columns = counts.sum(0).pow(SMOOTHING)
    shares = columns / columns.sum().clamp(min=1)
    expected = rows * shares.clamp(min=1e-12)
    information = (counts / expected).clamp(min=1).log()
    return information * (counts >= min_support)


def unit_mean_square(x: Tensor) -> Tensor:
    """Each row divided by its root mean square. A zero row stays zero."""
    mean_square = x.square().mean(1, keepdim=True)
    return x / mean_square.sqrt().clamp(min=1e-6)


@lru_cache(maxsize=2)
def directions(columns: int, width: int, device: torch.device) -> Tensor:
    """Random directions, [columns, width]; they depend on these two numbers alone."""
    rng = torch_generator(0, "contexts", columns, width)
    drawn = torch.randn(columns, width, generator=rng)
    return drawn.to(device)


@lru_cache(maxsize=2)
def word_directions(vocabulary: int, width: int, device: torch.device) -> Tensor:
    """The direction of each word; those of padding and of the unknown word are zero."""
    rng = torch_generator(0, "words", vocabulary, width)
    table = torch.randn(vocabulary, width, generator=rng)
    table[: UNKNOWN + 1] = 0
    return table.to(device)
