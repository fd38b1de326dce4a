"""The form that a client's reply must have. The server computes it by running the turn itself, without training.

It runs the turn on a few test examples. Each training phase returns the weights it was given, so nothing is learned.
The result has the blocks, tensors, types and shapes of a real reply, and values of a similar size. So no method has to
declare them. The turn is run as a new client and as one with private tensors; a block that only some of these replies
have is optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from profcil.engine.admission import knowledge
from profcil.engine.channel import Inbox, Reply, When
from profcil.engine.client import Client
from profcil.engine.phases import Trained
from profcil.engine.reply_checks import ReplyRequirements
from profcil.engine.world import World

EXAMPLES_PER_CLASS = 3
Private = Mapping[str, Tensor] | None


@dataclass
class ReplyForecast:
    """Computes the terms of clients' replies. A turn's private tensors are stored for the survey that follows."""

    private: dict[int, Private] = field(default_factory=dict)  # by client, after this round's turns

    def terms(
        self, action: str, world: World, method: Any, when: When, client: int, inbox: Inbox, limit: float = 1000.0
    ) -> ReplyRequirements:
        """The terms of one client's reply."""
        run = self.run_turns if action == "turn" else self.run_surveys
        replies = run(world, method, when, client, inbox)
        return ReplyRequirements(
            expected=replace(replies[0], blocks=all_blocks(replies)),
            required=frozenset.intersection(*(frozenset(r.blocks) for r in replies)),
            kinds=method.kinds,
            known=knowledge(world, method, when, client, inbox),
            limit=limit,
        )

    def run_turns(self, world: World, method: Any, when: When, client: int, inbox: Inbox) -> list[Reply]:
        """Replies as a new client, and with the private tensors of each earlier moment."""
        privates: list[Private] = [None]
        for moment in earlier_moments(world, when, client):
            reply = run_untrained_turn(method, dummy_client(world, moment, client, None), inbox)
            privates.append(reply.private)
        clients = [dummy_client(world, when, client, p) for p in privates]
        replies = [world.protected(c, inbox, run_untrained_turn(method, c, inbox)) for c in clients]
        self.private = {**self.private, client: replies[-1].private} if method.surveys(when) else {}
        return replies

    def run_surveys(self, world: World, method: Any, when: When, client: int, inbox: Inbox) -> list[Reply]:
        """Replies as a client without a turn in this round, as one with a turn, and as one that may have nothing to
        report: it has one example, and its own id, under which it may have reported before."""
        first, second = (dummy_client(world, when, client, p) for p in (None, self.private.pop(client, None)))
        silent = replace(first, id=client, current=first.current[:1], cache={}, kept={})
        with torch.no_grad():
            return [world.protected(c, inbox, method.survey(c, inbox)) for c in (first, second, silent)]


def all_blocks(replies: Sequence[Reply]) -> dict[str, Any]:
    """The blocks of all replies by name. Where several have a block of one name, the first reply's is used."""
    blocks: dict[str, Any] = {}
    for reply in reversed(replies):
        blocks |= reply.blocks
    return blocks


def earlier_moments(world: World, when: When, client: int) -> list[When]:
    """The last position at which the client had data, and the round before this one, if they exist."""
    positions = [p for p in range(when.position) if world.plan.observed(client, p)]
    moments = [replace(when, position=p) for p in positions[-1:]]
    if when.round:
        moments.append(replace(when, round=when.round - 1))
    return moments


def run_untrained_turn(method: Any, client: Client, inbox: Inbox) -> Reply:
    """A client's turn in which each training phase returns the weights it was given."""
    phases = method.turn(client, inbox)
    try:
        phase = next(phases)
        while True:
            phase = phases.send(Trained(phase.weights, 0.0, 0))
    except StopIteration as end:
        return end.value


def dummy_client(world: World, when: When, client: int, private: Private) -> Client:
    """A client whose data are test examples of the classes that `client` has at any position."""
    plan = world.plan
    early = when.before_stream
    classes = [y for p in range(plan.positions) for y in plan.observed(client, p)]
    least = (world.config.privacy.min_support, getattr(world.config.params, "min_support", 1))
    each = max(EXAMPLES_PER_CLASS, *least)
    examples = world.evaluation_examples.part(first_rows(world.evaluation_examples.y, classes, each))
    current = classes if early else plan.observed(client, when.position)
    return Client(
        id=plan.clients,  # one beyond the last client, so that it shares no random numbers with a real one
        when=when,
        seed=world.config.seed,
        examples=examples,
        current=torch.isin(examples.y, torch.tensor(current, device=world.device)).nonzero().flatten(),
        seen=() if early else tuple(sorted(plan.seen(when.position))),
        net=world.net,
        settings=replace(world.config.train, epochs=1),
        private=private,
        **world.limits(),
    )


def first_rows(y: Tensor, labels: Sequence[int], each: int) -> Tensor:
    """The first `each` rows of each class; the rows of a class that has fewer are repeated."""
    rows = [(y == label).nonzero().flatten() for label in sorted(set(labels))]
    return torch.cat([r.repeat(-(-each // max(1, len(r))))[:each] for r in rows])
