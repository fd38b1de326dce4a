"""Where the clients are: the seam between the one loop and whoever computes a round's turns and surveys.

The loop decides who is asked what and when; a fleet says who can be reached and brings back their replies. `Here` is
the simulation, all clients in this process. A deployment is another fleet under the same loop.
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
    """A client without a reply is one that could not answer, or whose answer cannot be used."""

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        """Those of the clients that can be asked now; nothing is sent to the others, and nothing booked."""

    def turns(
        self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes
    ) -> Mapping[int, Reply]: ...

    def surveys(
        self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes
    ) -> Mapping[int, Reply]: ...

    def facts(self) -> Mapping[str, float]:
        """What there is to say about the round just played."""


class Here:
    """All clients in this process; the run's state keeps their private tensors for them."""

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        return clients

    def turns(self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes) -> Mapping[int, Reply]:
        clients = {c: world.client(c, when, state.private.get(c)) for c in inboxes}
        return world.executor({c: method.turn(clients[c], inboxes[c]) for c in inboxes}, guard_of(world, when))

    def surveys(self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes) -> Mapping[int, Reply]:
        return {c: method.survey(world.client(c, when, state.private.get(c)), inbox) for c, inbox in inboxes.items()}

    def facts(self) -> Mapping[str, float]:
        return {}


def guard_of(world: World, when: When) -> Callable[[Train, Trained], bool]:
    """Nothing unusable is ever averaged in: by policy the run ends, naming the client, or goes on without it."""
    s = world.config.train

    def guard(phase: Train, result: Trained) -> bool:
        moved = [t for b in phase.blocks for t in result.weights[b].values() if t.numel()]
        sound = finite(moved) if result.max_abs is None else math.isfinite(result.max_abs)
        loss = float(result.loss)
        if sound and abs(loss) <= s.loss_limit:
            return True
        if s.on_divergence == "skip-client":
            return False
        raise Diverged(
            f"client {phase.client} diverged at position {when.position}, {when.stage} {when.round} ({phase.name}, "
            f"loss {loss:.3g}); lower train.lr, tighten train.clip, or set train.on_divergence=skip-client"
        )

    return guard


def finite(tensors: list[Tensor]) -> bool:
    """Whether every number is one. On a GPU few kernels count, on a CPU few operations; both carry NaN along."""
    if tensors[0].is_cuda:
        ends = list(torch._foreach_norm(tensors, torch.inf))
    else:
        ends = [x for t in tensors for x in torch.aminmax(t)]
    return bool(torch.isfinite(torch.stack(ends)).all())
