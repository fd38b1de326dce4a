"""The form that clients' replies must have. The server computes it by running the turn itself, without training.

It runs the turn on a few test examples. Each training phase returns the weights it was given, so nothing is learned.
The result has the blocks, tensors, types and shapes of a real reply, and values of a similar size. So no method has to
declare them. The turn is run as a new client and as one with private tensors; a block that only some of these replies
have is optional. For a secure sum, whose replies the server never sees, it is run once for all clients: as one that has
the classes of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profcil.engine.admission import knowledge
from profcil.engine.channel import Inbox, Reply, When
from profcil.engine.client import Client
from profcil.engine.phases import Trained
from profcil.engine.reply_checks import ReplyRequirements

if TYPE_CHECKING:
    from profcil.engine.world import World

EXAMPLES_PER_CLASS = 3
Private = Mapping[str, Tensor] | None
Clients = tuple[int, ...]


@dataclass
class ReplyForecast:
    """Computes the terms of clients' replies. A turn's private tensors are stored for the survey that follows."""

    private: dict[Clients, Private] = field(default_factory=dict)  # by client, after this round's turns

    def terms(
        self, action: str, world: World, method: Any, when: When, client: int, inbox: Inbox, limit: float = 1000.0
    ) -> ReplyRequirements:
        """The terms of one client's reply."""
        run = self.run_turns if action == "turn" else self.run_surveys
        replies = run(world, method, when, (client,), inbox, (client,))
        return ReplyRequirements(
            expected=replace(replies[0], blocks=all_blocks(replies)),
            required=frozenset.intersection(*(frozenset(r.blocks) for r in replies)),
            kinds=method.kinds,
            known=knowledge(world, method, when, client, inbox),
            limit=limit,
        )

    def summed(self, world: World, method: Any, when: When, inboxes: Mapping[int, Inbox]) -> Reply:
        """A reply with all blocks and notes that a client of a secure sum may have."""
        clients = tuple(sorted(inboxes))
        inbox = inboxes[clients[0]]
        if when.stage == "refresh":
            replies = survey(world, method, self.surveyed(world, when, clients, ()), inbox)
        else:
            replies = self.run_turns(world, method, when, clients, inbox, ())
        notes = {name: 0.0 for reply in replies for name in reply.notes}
        return Reply(clients[0], replies[0].samples, all_blocks(replies), notes=notes)

    def run_turns(
        self, world: World, method: Any, when: When, clients: Clients, inbox: Inbox, owner: Clients
    ) -> list[Reply]:
        """Replies as a new client, and with the private tensors of each earlier moment."""
        privates: list[Private] = [None]
        for moment in earlier_moments(world, when, clients):
            reply = run_untrained_turn(method, dummy_client(world, moment, clients, None), inbox)
            privates += [reply.private] if reply.private is not None else []
        dummies = [dummy_client(world, when, clients, p) for p in privates]
        replies = [world.protected(c, inbox, run_untrained_turn(method, c, inbox)) for c in dummies]
        self.private = {**self.private, owner: replies[-1].private} if method.surveys(when) else {}
        return replies

    def run_surveys(
        self, world: World, method: Any, when: When, clients: Clients, inbox: Inbox, owner: Clients
    ) -> list[Reply]:
        """Replies as the clients of `surveyed`, and as one that may have nothing to report: it has one example, and its
        own id, under which it may have reported before."""
        dummies = self.surveyed(world, when, clients, owner)
        silent = replace(dummies[0], id=clients[0], current=dummies[0].current[:1], cache={}, kept={})
        return survey(world, method, [*dummies, silent], inbox)

    def surveyed(self, world: World, when: When, clients: Clients, owner: Clients) -> list[Client]:
        """A client without a turn in this round, and one with a turn, if that stored private tensors."""
        private = self.private.pop(owner, None)
        privates = [None] if private is None else [None, private]
        return [dummy_client(world, when, clients, p) for p in privates]


def complete_reply(world: World, method: Any, client: Client, inbox: Inbox, classes: Sequence[int]) -> Reply:
    """A reply with all blocks and notes that a client of a secure sum may have, as one of them computes it: on a few of
    its own examples, as if they were of all classes of the sum. Only its form means anything."""
    dummy = client_with_classes(world, client, classes)
    dummies = [dummy, *([replace(dummy, private=None)] if client.private is not None else [])]
    if client.when.stage == "refresh":
        replies = survey(world, method, dummies, inbox)
    else:
        replies = [world.protected(c, inbox, run_untrained_turn(method, c, inbox)) for c in dummies]
    notes = {name: 0.0 for reply in replies for name in reply.notes}
    return Reply(client.id, 0, all_blocks(replies), notes=notes)


def client_with_classes(world: World, client: Client, classes: Sequence[int]) -> Client:
    """A client with some examples of another and these labels; before the stream with any labels."""
    each = examples_per_class(world)
    labels = torch.tensor(sorted(classes) or [0], device=world.device).repeat_interleave(each)
    rows = client.current if len(client.current) else torch.arange(len(client.examples), device=world.device)
    part = client.examples.part(rows.repeat(-(-len(labels) // len(rows)))[: len(labels)])
    examples = replace(part, y=labels)
    return replace(
        client,
        id=-1,  # so that it shares no random numbers with a real one
        examples=examples,
        current=torch.arange(len(labels), device=world.device),
        settings=replace(client.settings, epochs=1),
        cache={},
        kept={},
    )


@torch.no_grad()
def survey(world: World, method: Any, clients: Sequence[Client], inbox: Inbox) -> list[Reply]:
    """The replies of some clients to a survey."""
    return [world.protected(c, inbox, method.survey(c, inbox)) for c in clients]


def all_blocks(replies: Sequence[Reply]) -> dict[str, Any]:
    """The blocks of all replies by name. Where several have a block of one name, the first reply's is used."""
    blocks: dict[str, Any] = {}
    for reply in reversed(replies):
        blocks |= reply.blocks
    return blocks


def earlier_moments(world: World, when: When, clients: Clients) -> list[When]:
    """The last position at which one of the clients had data, and the round before this one, if they exist."""
    positions = [p for p in range(when.position) if observed(world, clients, p)]
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
        reply: Reply = end.value
        return reply


def observed(world: World, clients: Clients, position: int) -> list[int]:
    """The classes that some clients have at a position."""
    return [y for client in clients for y in world.plan.observed(client, position)]


def dummy_client(world: World, when: When, clients: Clients, private: Private) -> Client:
    """A client whose data are test examples of the classes that some clients have at any position."""
    plan = world.plan
    early = when.before_stream
    classes = [y for p in range(plan.positions) for y in observed(world, clients, p)]
    found = first_rows(world.evaluation_examples.y, classes, examples_per_class(world))
    examples = world.evaluation_examples.part(found)
    current = classes if early else observed(world, clients, when.position)
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
        summed=world.config.privacy.secure_sum,
    )


def examples_per_class(world: World) -> int:
    """Enough examples of a class for it to be in all statistics."""
    return max(EXAMPLES_PER_CLASS, world.config.privacy.min_support, getattr(world.config.params, "min_support", 1))


def first_rows(y: Tensor, labels: Sequence[int], each: int) -> Tensor:
    """The first `each` rows of each class; the rows of a class that has fewer are repeated."""
    rows = [(y == label).nonzero().flatten() for label in sorted(set(labels))]
    return torch.cat([r.repeat(-(-each // max(1, len(r))))[:each] for r in rows])
