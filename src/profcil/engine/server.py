"""What a method's server half can see when it trains: a model skeleton, a seed and shapes; no one's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.model.net import Net
from profcil.randomness import derive_seed

Step = Callable[[], None]


def unchanged(step: Step) -> Step:
    return step


@dataclass(frozen=True)
class Server:
    """The server at one moment."""

    when: When
    seed: int
    seen: tuple[int, ...]  # Y^(p)
    net: Net  # a skeleton to compute with; holds no one's weights between calls
    like: Inputs  # the encoder's inputs for no example at all: shapes and types
    repeated: Callable[[Step], Step] = unchanged  # prepares a step that is taken many times on the same tensors

    def number(self, *purpose: object) -> int:
        """The seed of a draw, addressed by moment."""
        w = self.when
        return derive_seed(self.seed, "server", w.stage, w.position, w.round, *purpose)
