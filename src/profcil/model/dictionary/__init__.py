"""Dictionaries: fixed features of the inputs, on which a federation agrees before the stream.

A dictionary is found from sums over clients in a few rounds and never changed afterwards, so that statistics of its
features do not become stale. `engine/dictionary.py` runs the rounds; each modality has a module of its own here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from profcil.data.bundle import Facts, Inputs
from profcil.errors import unknown


class Dictionary(Protocol):
    """A way to find fixed features, and to compute them. `Entries` are the tensors that define them."""

    width: int  # features per example
    rounds: int  # rounds of sums that finding the entries takes
    min_support: int  # examples that must be behind an entry
    usable_untrained: bool  # whether the first entries, which no client has influenced, give features already

    def begin(self, rng: torch.Generator) -> dict[str, Tensor]:
        """The entries before the first round."""
        ...

    def sums(self, entries: dict[str, Tensor], inputs: Inputs, round: int) -> dict[str, Tensor]:
        """What a client sends of its inputs in a round. Sums of disjoint sets of examples are additive."""
        ...

    def update(self, entries: dict[str, Tensor], sums: dict[str, Tensor], round: int) -> dict[str, Tensor]:
        """The entries after a round, from the sums of all clients."""
        ...

    def features(self, entries: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The features of each example, [examples, width]."""
        ...


TEXT_ENTRIES = ("ngrams", "contexts", "hashes")  # what the dictionary of texts consists of


def make_dictionary(
    facts: Facts, like: Inputs, vocabulary: int, width: int, min_support: int, text_entries: str = "ngrams"
) -> Dictionary:
    """The dictionary of a modality. `like` is an empty batch of inputs, for their shapes."""
    if facts.modality == "image":
        from profcil.model.dictionary.image import ImageDictionary

        mirror = "flip" in facts.views  # a mirror image has the same label
        return ImageDictionary(width, tuple(like[0].shape[1:]), min_support, mirror)
    if facts.modality == "text" and text_entries == "contexts":
        from profcil.model.dictionary.context import ContextDictionary

        return ContextDictionary(width, vocabulary, min_support)
    if facts.modality == "text" and text_entries == "hashes":
        from profcil.model.dictionary.hashed import HashedDictionary

        return HashedDictionary(width, vocabulary, min_support)
    if facts.modality == "text":
        from profcil.model.dictionary.text import TextDictionary

        return TextDictionary(width, vocabulary, min_support)
    if facts.modality == "graph":
        from profcil.model.dictionary.graph import GraphDictionary

        return GraphDictionary(width, min_support)
    if facts.modality == "table":
        from profcil.model.dictionary.table import TableDictionary

        return TableDictionary(width, like[0].shape[1], min_support)
    raise unknown("modality", facts.modality, ("image", "text", "graph", "table"))
