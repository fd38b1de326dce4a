"""What a method has of the server when it trains there: a model, a seed and the shapes of inputs, but no data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.model.net import Net
from profcil.randomness import derive_seed

Step = Callable[[], None]


def unchanged(step: Step) -> Step:
    """The step itself, without acceleration."""
    return step


@dataclass(frozen=True)
class Server:
    """The server at one moment."""

    when: When
    seed: int
    seen: tuple[int, ...]  # Y^(p)
    net: Net  # shared with the clients; weights are loaded before each use
    like: Inputs  # the encoder's inputs for zero examples: shapes and types
    repeated: Callable[[Step], Step] = unchanged  # accelerates a step that is called many times on the same tensors

    def number(self, *purpose: object) -> int:
        """The seed of a draw. It depends on the moment alone."""
        w = self.when
        return derive_seed(self.seed, "server", w.stage, w.position, w.round, *purpose)
