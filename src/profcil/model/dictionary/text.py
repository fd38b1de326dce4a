"""A dictionary of texts: the most frequent words and pairs of adjacent words.

The clients count their texts with each word and each pair; pairs are hashed. The server adds the counts. The most
frequent n-grams become entries. A text is represented by the entries that it contains, divided by the root of their
number.

An entry reveals that an n-gram is frequent among all clients: in at least `min_support` texts. The counts of one client
reveal which words it has, and, up to collisions of the hash, which pairs. A deployment should add secure summation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs

BUCKETS = 1 << 20  # of the hash of pairs
MULTIPLIER = 2_654_435_761  # Knuth's multiplicative hash
SHIFT = 12  # the low bits of a product are the less mixed ones
UNKNOWN = 1  # token ids up to this one are no words: padding and unknown
CHUNK = 4096  # texts at a time


class TextDictionary:
    """Presence of the `width` most frequent words and pairs. Columns without an entry are zero."""

    rounds = 1
    usable_untrained = False

    def __init__(self, width: int, vocabulary: int, min_support: int = 1) -> None:
        self.width = width
        self.vocabulary = vocabulary
        self.min_support = max(min_support, 1)

    def begin(self, rng: torch.Generator) -> dict[str, Tensor]:
        """No entries. Nothing is drawn."""
        no_ngrams = torch.full((self.width,), -1, dtype=torch.long)
        return {"ngrams": no_ngrams}

    def sums(self, entries: dict[str, Tensor], inputs: Inputs, round: int) -> dict[str, Tensor]:
        """The number of texts that contain each n-gram."""
        (tokens,) = inputs
        size = self.vocabulary + BUCKETS
        texts = torch.zeros(size, dtype=torch.int32, device=tokens.device)
        for part in tokens.split(CHUNK):
            ids = ngrams(part, self.vocabulary)
            texts += count_texts(ids, size)
        return {"texts": texts}

    def update(self, entries: dict[str, Tensor], sums: dict[str, Tensor], round: int) -> dict[str, Tensor]:
        """The most frequent n-grams with support."""
        frequent = most_frequent(sums["texts"], self.width, self.min_support)
        return {"ngrams": frequent}

    def features(self, entries: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The entries that each text contains, [texts, width]."""
        (tokens,) = inputs
        ids = ngrams(tokens, self.vocabulary)
        columns = column_of(ids, entries["ngrams"], self.vocabulary + BUCKETS)
        present = tokens.new_zeros(tokens.shape[0], self.width + 1, dtype=torch.float32)
        present.scatter_(1, columns, 1.0)  # the last column is for n-grams that are no entries
        present = present[:, : self.width]
        number = present.sum(1, keepdim=True)
        return present / number.clamp(min=1).sqrt()


def ngrams(tokens: Tensor, vocabulary: int) -> Tensor:
    """The ids of the words and hashed pairs of each text, [texts, 2 * length - 1]; -1 where there is none."""
    first = tokens[:, :-1]
    second = tokens[:, 1:]
    words = tokens.where(tokens > UNKNOWN, -1)
    are_words = (first > UNKNOWN) & (second > UNKNOWN)
    buckets = hashed(first * vocabulary + second)
    pairs = (vocabulary + buckets).where(are_words, -1)
    return torch.cat([words, pairs], 1)


def hashed(keys: Tensor) -> Tensor:
    """A bucket for each key."""
    return ((keys * MULTIPLIER) >> SHIFT) & (BUCKETS - 1)


def count_texts(ids: Tensor, size: int) -> Tensor:
    """In how many rows each id below `size` occurs. An id that a row repeats counts once; -1 does not count."""
    ids = ids.sort(1).values
    equals_previous = ids[:, 1:] == ids[:, :-1]
    again = F.pad(equals_previous, (1, 0))
    counted = ids[(ids >= 0) & ~again]
    return torch.bincount(counted, minlength=size).int()


def most_frequent(counts: Tensor, width: int, min_support: int) -> Tensor:
    """The `width` ids with the largest counts, falling. Ids with less support than `min_support` are replaced by -1.
    Of equal counts the smaller id comes first."""
    counts, ids = counts.sort(descending=True, stable=True)
    ids = ids.where(counts >= min_support, -1)
    ids = ids[:width]
    missing = width - len(ids)
    return F.pad(ids, (0, missing), value=-1)


def column_in_table(ids: Tensor, entries: Tensor, size: int) -> Tensor:
    """As `column_of`, from a table with a cell for each id below `size`. The last cell is for -1."""
    none = len(entries)
    table = torch.full((size + 1,), none, dtype=torch.long)
    table = table.scatter(0, entries.where(entries >= 0, size), torch.arange(none))
    columns = table[ids.where(ids >= 0, size)]
    return columns.where(ids >= 0, none)


def column_of(ids: Tensor, entries: Tensor, size: int) -> Tensor:
    """The position of each id below `size` among the entries; the number of entries if it is none of them."""
    if torch.compiler.is_exporting():  # ONNX has no binary search
        return column_in_table(ids, entries, size)
    ordered, position = entries.sort()
    last = len(entries) - 1
    found = torch.searchsorted(ordered, ids).clamp(max=last)
    known = (ordered[found] == ids) & (ids >= 0)
    return position[found].where(known, len(entries))
