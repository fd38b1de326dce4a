"""What the sites of a federation agree on before a run: modality, classes, tasks, and which sites take part.

federation.toml is part of the app. Each site also has a manifest.toml, which names its data and says which classes
arrive at which position. The server learns how many examples of each class a site has. It receives no examples.

Classes may be declared later than the start: `reserve` is the number of them that the model has outputs for, and each
[[later]] table names a position and the tasks that are known from it on (`Federation.at`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from profcil.config import SITES
from profcil.data.bundle import Bundle, Examples, Facts
from profcil.data.input_format import InputFormat
from profcil.data.loading import check_bundle, fingerprint
from profcil.data.own.assemble import ENCODERS, VIEWS

LAST_POSITION = 10_000_000  # later than any position


@dataclass(frozen=True)
class Later:
    """Tasks that are declared after the start."""

    position: int  # from which they are known, counted from 1
    tasks: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Federation:
    """The agreed terms. Class ids follow the order in which the tasks name the classes."""

    modality: str
    tasks: tuple[tuple[str, ...], ...]
    sites: tuple[str, ...]
    length: int = 32  # texts: number of tokens read from each
    vocabulary: int = 10_000  # texts: number of token ids; a word's id is a hash, so no site shares its words
    shape: tuple[int, ...] = (1, 28, 28)  # images: channels, height, width
    features: int = 0  # graphs: number of features of a node
    columns: tuple[str, ...] = ()  # tables: names of the columns that are inputs
    mean: tuple[float, ...] = ()  # tables: the mean of each column, about; empty = 0
    std: tuple[float, ...] = ()  # tables: the deviation of each column, about; empty = 1
    views: tuple[str, ...] | None = None  # augmentations that keep the label; None = the modality's default
    encoder: str = ""  # empty = the modality's default
    max_examples: int = 1_000_000  # that one site may declare; they are its weight in averages
    keys: Mapping[str, str] = field(default_factory=dict)  # site → fingerprint of its node's key
    reserve: int = 0  # classes that may be declared later
    later: tuple[Later, ...] = ()
    declared: tuple[int, ...] = ()  # the position from which each task is known; not part of the file

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task)

    @property
    def grows(self) -> bool:
        """Whether classes may be declared later, or have been."""
        return self.reserve > 0 or any(self.declared)

    def at(self, position: int) -> Federation:
        """The terms at a position, counted from 0. Reserved classes are used by the tasks declared until then."""
        due = [entry for entry in self.later if entry.position - 1 <= position]
        tasks = [(entry.position - 1, task) for entry in due for task in entry.tasks]
        used = sum(len(task) for _, task in tasks)
        first = self.declared or (0,) * len(self.tasks)
        return replace(
            self,
            tasks=(*self.tasks, *(task for _, task in tasks)),
            declared=(*first, *(p for p, _ in tasks)),
            later=self.later[len(due) :],
            reserve=self.reserve - used,
        )

    def task_ids(self) -> tuple[tuple[int, ...], ...]:
        """The tasks, with class ids instead of names."""
        ids = {name: i for i, name in enumerate(self.classes)}
        return tuple(tuple(ids[name] for name in task) for task in self.tasks)

    def facts(self) -> Facts:
        views = VIEWS[self.modality] if self.views is None else self.views
        encoder = self.encoder or ENCODERS[self.modality]
        classes = len(self.classes) + self.reserve
        return Facts(SITES, "the federation", self.modality, classes, None, None, views=views, encoder=encoder)

    def input_format(self) -> InputFormat:
        """How a raw input becomes tensors, the same at every site."""
        if self.modality == "text":
            return InputFormat("text", (self.length,), splitter="words", vocabulary=self.vocabulary)
        if self.modality == "table":
            return InputFormat("table", (len(self.columns),), columns=self.columns)
        shape = self.shape if self.modality == "image" else (self.features,)
        return InputFormat(self.modality, shape)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The means and deviations by which inputs are scaled, the same at every site."""
        if self.modality == "table":
            count = len(self.columns)
            mean = tuple(map(float, self.mean)) or (0.0,) * count
            return mean, tuple(map(float, self.std)) or (1.0,) * count
        channels = self.shape[0] if self.modality == "image" else 0
        return (0.5,) * channels, (0.25,) * channels

    def bundle(self, examples: Examples, test: Examples | None = None) -> Bundle:
        """Examples as a dataset. Without test examples, the examples are both parts."""
        mean, std = self.statistics()
        vocabulary = self.vocabulary if self.modality == "text" else 0
        form = self.input_format()
        scored = examples if test is None else test
        names = (*self.classes, *(f"(reserved {i + 1})" for i in range(self.reserve)))
        bundle = Bundle(self.facts(), examples, scored, None, names, vocabulary, mean, std, input_format=form)
        check_bundle(bundle)
        return replace(bundle, fingerprint=fingerprint(bundle))
