"""The interface between the loop and the code that computes the turns and surveys of a round.

The loop decides which clients are asked for what. A fleet says which of them can be reached and returns their replies.
`LocalFleet` is the simulation, with all clients in this process. A deployment is another fleet for the same loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from profcil.engine.channel import When
from profcil.engine.payload import Inbox, Reply
from profcil.engine.phases import Train, Trained
from profcil.errors import Diverged

if TYPE_CHECKING:
    from profcil.engine.loop import RunState
    from profcil.engine.world import World

Inboxes = Mapping[int, Inbox]  # by client


class Fleet(Protocol):
    """Computes turns and surveys. A client without a reply could not answer, or its reply is not usable."""

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        """The clients that can be asked now. Nothing is sent to the others, and nothing is metered for them."""

    def turns(
        self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes
    ) -> Mapping[int, Reply]: ...

    def surveys(
        self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes
    ) -> Mapping[int, Reply]: ...

    def facts(self) -> Mapping[str, float]:
        """Facts of the last round for the log."""


class LocalFleet:
    """All clients in this process. Their private tensors are part of the run's state."""

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        return clients

    def turns(self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes) -> Mapping[int, Reply]:
        clients = {c: world.client(c, when, state.private.get(c)) for c in inboxes}
        started = {c: method.turn(clients[c], inboxes[c]) for c in inboxes}
        return world.executor(started, make_guard(world, when))

    def surveys(self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes) -> Mapping[int, Reply]:
        replies = {}
        for c, inbox in inboxes.items():
            client = world.client(c, when, state.private.get(c))
            replies[c] = method.survey(client, inbox)
        return replies

    def facts(self) -> Mapping[str, float]:
        return {}


def make_guard(world: World, when: When) -> Callable[[Train, Trained], bool]:
    """A check of each phase's result, so that no diverged client is averaged. By `train.on_divergence` the run ends
    with an error that names the client, or continues without it."""
    settings = world.config.train

    def guard(phase: Train, result: Trained) -> bool:
        loss = float(result.loss)
        if is_finite(phase, result) and abs(loss) <= settings.loss_limit:
            return True
        if settings.on_divergence == "skip-client":
            return False
        place = f"position {when.position + 1}, {when.stage} {when.round + 1}"
        raise Diverged(
            f"client {phase.client} diverged at {place} ({phase.name}, loss {loss:.3g}); "
            "lower train.lr, tighten train.clip, or set train.on_divergence=skip-client"
        )

    return guard


def is_finite(phase: Train, result: Trained) -> bool:
    """Whether the trained parameters of a phase have no NaN and no infinity."""
    if result.max_abs is not None:
        return math.isfinite(result.max_abs)
    tensors = [t for block in phase.blocks for t in result.weights[block].values()]
    return finite([t for t in tensors if t.numel()])


def finite(tensors: list[Tensor]) -> bool:
    """Whether no value is NaN or infinite. Norms (on a GPU) and extremes (on a CPU) are fast and propagate NaN."""
    if tensors[0].is_cuda:
        extremes = list(torch._foreach_norm(tensors, torch.inf))
    else:
        extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return bool(torch.isfinite(torch.stack(extremes)).all())
