"""What a method's client half can see: its own data, the place in the stream, and nothing of other clients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.data.bundle import Examples, Inputs
from profcil.engine.channel import When
from profcil.engine.payload import Block
from profcil.engine.phases import Batch, Source, Train, source_of
from profcil.model.net import Net, Weights
from profcil.protocol.heterogeneity import share_of
from profcil.randomness import derive_seed
from profcil.tensors import to_device

Fact = TypeVar("Fact")
# What examples are looked at through: a base's weights, or any function of the net and their inputs.
Lens: TypeAlias = Block | Mapping[str, Tensor] | Callable[[Net, Inputs], Tensor]


@dataclass
class Client:
    """One client at one moment. `current` are the rows of `examples` that carry labels now."""

    id: int
    when: When
    seed: int
    examples: Examples
    current: Tensor
    seen: tuple[int, ...]  # Y^(p): the classes introduced to the federation so far
    net: Net  # a skeleton to compute with; holds no one's weights between calls
    settings: TrainSettings
    budget: float = 1.0  # share of the local epochs this turn has; less where its task is the weak one
    private: Mapping[str, Tensor] | None = None
    cache: dict[Any, Tensor] = field(default_factory=dict)  # features by base version, for this position
    kept: dict[Any, Any] = field(default_factory=dict)  # what `once` has worked out, for this position
    extra_bytes: int = 0  # client memory that the method asked for in this turn

    def once(self, name: Hashable, make: Callable[[], Fact]) -> Fact:
        """What stays as it is while a position lasts, worked out when it is first asked for."""
        key = (self.id, name)
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @property
    def y(self) -> Tensor:
        return self.once("y", lambda: self.examples.y[self.current])

    @property
    def y_list(self) -> list[int]:
        """The same as Python integers."""
        return self.once("y_list", self.y.tolist)

    @property
    def labels(self) -> tuple[int, ...]:
        """The classes that this client observes now, ascending."""
        return self.once("labels", lambda: tuple(sorted(set(self.y_list))))

    @property
    def rank(self) -> Tensor:
        """The index of each current example's class in `labels`."""

        def make() -> Tensor:
            place = {label: i for i, label in enumerate(self.labels)}
            return self.tensor([place[label] for label in self.y_list])

        return self.once("rank", make)

    def tensor(self, values: Sequence[int] | Tensor) -> Tensor:
        """Class ids, row numbers or any other tensor, on the device of this client's data."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.long)
        return to_device(tensor, self.current.device)

    def allowed(self, labels: tuple[int, ...]) -> Tensor:
        """A mask over all class ids; not to be changed."""

        def make() -> Tensor:
            mask = torch.zeros(self.net.classes, dtype=torch.bool)
            mask[list(labels)] = True
            return to_device(mask, self.current.device)

        return self.once(("allowed", labels), make)

    def number(self, *purpose: object) -> int:
        """The seed of a draw: addressed by client and moment, so the order of execution never matters."""
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
        """A training phase of this client; on its current examples, unless another source is given, and with the
        run's training settings, unless others are given."""
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
            epochs=share_of(self.budget, epochs or settings.epochs),
            seed=self.number(name),
            proximal=proximal,
            constants=constants,
            inputs=inputs,
        )

    def features(self, lens: Lens, index: Tensor | None = None) -> Tensor:
        """Features of the current examples (or of some), without gradients. Under a broadcast base, which has a
        version, those of all current examples are computed once and reused."""
        if index is not None or not isinstance(lens, Block):
            return embed(self.net, lens, self.examples, self.current if index is None else index)
        key = (self.id, lens.version)
        if key not in self.cache:
            self.cache[key] = embed(self.net, lens, self.examples, self.current)
        return self.cache[key]

    def keep(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as extra client memory, so that it is metered."""
        self.extra_bytes += tensor.numel() * tensor.element_size()
        return tensor


@torch.no_grad()
def embed(net: Net, lens: Lens, examples: Examples, index: Tensor) -> Tensor:
    """u = h(x) for some examples, in evaluation mode, or another function of the model and their inputs."""
    if callable(lens):
        return torch.cat([lens(net, examples.inputs(chunk)) for chunk in index.split(examples.chunk)])
    net.load({"base": dict(lens.tensors if isinstance(lens, Block) else lens)})
    return net.embed(examples, index)
