"""The view that a method has of a client: its data, its place in the stream, and nothing of other clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.data.bundle import Examples, Inputs, to_device
from profcil.engine.channel import Block, When
from profcil.engine.phases import Batch, GradientNoise, Source, Train, source_of
from profcil.memory.linear import clipped, normalised
from profcil.model.net import Net, Weights
from profcil.protocol.heterogeneity import share_of
from profcil.randomness import derive_seed

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class BlockFeatures:
    """Features that a function computes from the inputs and one block. They are the same as long as the block has this
    version."""

    compute: Callable[[Net, Inputs], Tensor]
    version: int


# How features are computed: the weights of a base, or any function of the model and the inputs.
FeatureMap: TypeAlias = Block | BlockFeatures | Mapping[str, Tensor] | Callable[[Net, Inputs], Tensor]
FeatureKey: TypeAlias = tuple[Hashable, type, int]  # whose examples, how they are computed, and the block's version


@dataclass
class Client:
    """One client at one moment. `current` are the rows of `examples` that have labels now."""

    id: int
    when: When
    seed: int
    examples: Examples
    current: Tensor
    seen: tuple[int, ...]  # Y^(p): the classes introduced to the federation so far
    net: Net  # shared by all clients; weights are loaded before each use
    settings: TrainSettings
    budget: float = 1.0  # share of the local epochs in this turn; below 1 on the weakened task
    private: Mapping[str, Tensor] | None = None
    cache: dict[FeatureKey, Tensor] = field(default_factory=dict)  # features under blocks, for this position
    kept: dict[Any, Any] = field(default_factory=dict)  # results of `once`, for this position
    extra_bytes: int = 0  # client memory that the method used in this turn
    bound: float = math.inf  # norm to which rows are clipped before they are summed
    min_support: int = 1  # a class with fewer examples is in no statistics
    withheld: frozenset[int] = frozenset()  # classes that are in no statistics, being rare in a sum of clients
    noise: GradientNoise | None = None  # on the gradients of its training
    summed: bool = False  # whether its replies are summed with those of others, so that statistics must be sums

    def once(self, name: Hashable, make: Callable[[], Fact]) -> Fact:
        """A value that is constant during a position. It is computed on first use."""
        key = (self.id, name)
        if key not in self.kept:
            self.kept[key] = make()
        value: Fact = self.kept[key]
        return value

    @property
    def y(self) -> Tensor:
        """The labels of the current examples."""
        return self.once("y", lambda: self.examples.y[self.current])

    @property
    def y_list(self) -> list[int]:
        """The labels of the current examples as Python integers; reading them does not synchronise a GPU."""
        return self.once("y_list", self.y.tolist)

    @property
    def labels(self) -> tuple[int, ...]:
        """The classes that this client observes now, ascending."""
        return self.once("labels", lambda: tuple(sorted(set(self.y_list))))

    @property
    def rank(self) -> Tensor:
        """The index of each current example's class in `labels`."""

        def make() -> Tensor:
            row = {label: i for i, label in enumerate(self.labels)}
            return self.tensor([row[label] for label in self.y_list])

        return self.once("rank", make)

    def tensor(self, values: Sequence[int] | Tensor) -> Tensor:
        """Class ids, row numbers or any other tensor, on the device of this client's data."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.long)
        return to_device(tensor, self.current.device)

    def allowed(self, labels: tuple[int, ...]) -> Tensor:
        """The mask of these classes over all class ids. It is shared and must not be changed."""

        def make() -> Tensor:
            mask = torch.zeros(self.net.classes, dtype=torch.bool)
            mask[list(labels)] = True
            return to_device(mask, self.current.device)

        return self.once(("allowed", labels), make)

    def number(self, *purpose: object) -> int:
        """The seed of a draw. It depends on the client and the moment, not on the order of execution."""
        w = self.when
        return derive_seed(self.seed, "client", self.id, w.stage, w.position, w.round, *purpose)

    def train(
        self,
        name: str,
        weights: Weights,
        blocks: tuple[str, ...],
        loss: Callable[[Any, Batch], Tensor],
        source: Source | None = None,
        *,
        proximal: float = 0.0,
        epochs: int | None = None,
        settings: TrainSettings | None = None,
        **constants: Tensor,
    ) -> Train:
        """A training phase of this client. By default it trains on the current examples, with the run's training
        settings."""
        settings = settings or self.settings
        inputs = self.examples.inputs if source is None else None
        source = source or source_of(self.examples, self.current)
        return Train(
            name=name,
            client=self.id,
            weights=weights,
            blocks=blocks,
            loss=loss,
            source=source,
            settings=settings,
            epochs=self.affordable(epochs or settings.epochs),
            seed=self.number(name),
            proximal=proximal,
            constants=constants,
            inputs=inputs,
            noise=self.noise,
        )

    def affordable(self, epochs: int) -> int:
        """The local epochs that this client computes of a number of planned ones: all, but for the weakened task."""
        return epochs if self.budget == 1 else share_of(self.budget, epochs)

    def features(self, feature_map: FeatureMap, index: Tensor | None = None) -> Tensor:
        """Features of the current examples, or of the rows in `index`, without gradients. A broadcast block has a
        version: under it the features of all current examples are computed once and reused."""
        if index is not None:
            return embed(self.net, feature_map, self.examples, index)
        return embed_once(self.net, feature_map, self.examples, self.current, self.cache, self.id)

    @property
    def supported(self) -> tuple[int, ...]:
        """The classes with enough examples for statistics."""
        count = Counter(self.y_list)
        return tuple(y for y in self.labels if count[y] >= self.min_support and y not in self.withheld)

    def with_support(self, features: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """The features of the current examples whose class is supported; for each the index of its class; and these
        classes."""
        labels = self.supported
        if labels == self.labels:
            return features, self.rank, labels
        row = {label: i for i, label in enumerate(labels)}
        kept = [i for i, label in enumerate(self.y_list) if label in row]
        rank = self.tensor([row[self.y_list[i]] for i in kept])
        return features[self.tensor(kept)], rank, labels

    def bounded(self, rows: Tensor) -> Tensor:
        """The rows, those longer than `bound` shortened to it, so that no example adds more than that to a sum."""
        return rows if math.isinf(self.bound) else clipped(rows, self.bound)

    def normalised(self, rows: Tensor) -> Tensor:
        """The rows with zero mean and the length `bound`, so that every example adds as much as noise hides. Without a
        bound they stay as they are."""
        return rows if math.isinf(self.bound) else normalised(rows, self.bound)

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts a tensor as extra client memory, and returns it."""
        self.extra_bytes += tensor.numel() * tensor.element_size()
        return tensor


@torch.no_grad()
def embed(net: Net, feature_map: FeatureMap, examples: Examples, index: Tensor) -> Tensor:
    """u = h(x) for the examples in `index`, in evaluation mode, or another function of the model and their inputs."""
    if isinstance(feature_map, BlockFeatures):
        feature_map = feature_map.compute
    if callable(feature_map):
        chunks = index.split(examples.chunk)
        return torch.cat([feature_map(net, examples.inputs(chunk)) for chunk in chunks])
    tensors = feature_map.tensors if isinstance(feature_map, Block) else feature_map
    net.load({"base": dict(tensors)})
    return net.embed(examples, index)


def embed_once(
    net: Net,
    feature_map: FeatureMap,
    examples: Examples,
    index: Tensor,
    cache: dict[FeatureKey, Tensor],
    owner: Hashable,
) -> Tensor:
    """The same, but features that depend on a block with a version are taken from the cache if they are there."""
    if not isinstance(feature_map, Block | BlockFeatures):
        return embed(net, feature_map, examples, index)
    key = (owner, type(feature_map), feature_map.version)
    if key not in cache:
        cache[key] = embed(net, feature_map, examples, index)
    return cache[key]
