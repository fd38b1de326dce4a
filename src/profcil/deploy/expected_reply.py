"""What a client's reply must look like: the server plays the turn itself, without training, on a few test examples.

Every phase hands its own weights back, so nothing is learnt; what comes out has the blocks, tensors, types and shapes
of a real reply, and values of its order of size. No method has to declare any of that. It is played as a client that
is new and as one with a past: what not all of them send may be there or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Inbox, Reply
from profcil.engine.phases import Trained
from profcil.engine.reply_checks import Terms
from profcil.engine.world import World

EXAMPLES = 3  # of each class
Private = Mapping[str, Tensor] | None


@dataclass
class Understudy:
    """Stands in for any client, with a few examples of that client's classes."""

    past: dict[int, Private] = field(default_factory=dict)  # after this round's turns, where a survey follows

    def terms(
        self, what: str, world: World, method: Any, when: When, client: int, inbox: Inbox, limit: float = 1000.0
    ) -> Terms:
        """What a client may say: about classes it has met so far or was told of, with no more examples than it has."""
        plan, warm = world.plan, when.stage == "warmup"
        play = self.turns if what == "turn" else self.surveys
        replies = play(world, method, when, client, inbox)
        met = {y for p in range(when.position + 1) for y in plan.observed(client, p)}
        told = {y for b in inbox.values() for y in b.labels}
        return Terms(
            expected=replace(replies[0], blocks={n: b for r in reversed(replies) for n, b in r.blocks.items()}),
            required=frozenset.intersection(*(frozenset(r.blocks) for r in replies)),
            kinds=method.kinds,
            classes=frozenset(met | told),
            most=len(plan.clean.owned(client) if warm else plan.samples(client, when.position)),
            confidence=float(getattr(method.params, "neighbours", 1.0)),
            limit=limit,
        )

    def turns(self, world: World, method: Any, when: When, client: int, inbox: Inbox) -> list[Reply]:
        """As a new client, as one that has played where it last had data, and as one that has played this position."""
        before = [replace(when, position=p) for p in range(when.position) if world.plan.observed(client, p)][-1:]
        before += [replace(when, round=when.round - 1)] if when.round else []
        pasts = [run_untrained_turn(method, actor(world, then, client, None), inbox).private for then in before]
        replies = [run_untrained_turn(method, actor(world, when, client, past), inbox) for past in (None, *pasts)]
        self.past = {**self.past, client: replies[-1].private} if method.surveys(when) else {}
        return replies

    def surveys(self, world: World, method: Any, when: When, client: int, inbox: Inbox) -> list[Reply]:
        """As a client that did not play this round, and as one that did."""
        with torch.no_grad():
            pasts = (None, self.past.pop(client, None))
            return [method.survey(actor(world, when, client, past), inbox) for past in pasts]


def run_untrained_turn(method: Any, client: Client, inbox: Inbox) -> Reply:
    acting = method.turn(client, inbox)
    try:
        phase = next(acting)
        while True:
            phase = acting.send(Trained(phase.weights, 0.0, 0))
    except StopIteration as end:
        return end.value


def actor(world: World, when: When, client: int, private: Private) -> Client:
    """One beyond the last client, whose data are scored examples of the classes that `client` has and will have."""
    plan, warm = world.plan, when.stage == "warmup"
    ever = [y for p in range(plan.positions) for y in plan.observed(client, p)]
    examples = world.judged.part(few(world.judged.y, ever))
    now = ever if warm else plan.observed(client, when.position)
    return Client(
        id=plan.clients,
        when=when,
        seed=world.config.seed,
        examples=examples,
        current=torch.isin(examples.y, torch.tensor(now, device=world.device)).nonzero().flatten(),
        seen=() if warm else tuple(sorted(plan.seen(when.position))),
        net=world.net,
        settings=replace(world.config.train, epochs=1),
        private=private,
    )


def few(y: Tensor, labels: Sequence[int]) -> Tensor:
    """The first few rows of each class."""
    return torch.cat([(y == label).nonzero().flatten()[:EXAMPLES] for label in sorted(set(labels))])
