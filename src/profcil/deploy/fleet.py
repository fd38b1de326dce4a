"""The fleet of a deployment: clients are asked over Flower's grid, and what they answer is judged before it is taken.

The loop above knows nothing of this. Replies come in any order and go back by client; who is silent, late or refused
is written into the run folder and counted. Private memory stays where it is: the server only knows the name of the
memory that a client's last accepted reply left behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from profcil.deploy.exchange import Exchange
from profcil.deploy.expected_reply import Understudy
from profcil.deploy.mailbox import Post, place
from profcil.deploy.node_registry import Note, Roster
from profcil.deploy.policy import Policy
from profcil.deploy.wire import Ask
from profcil.engine.channel import Parcel, When
from profcil.engine.loop import RunState
from profcil.engine.payload import Reply
from profcil.engine.world import World
from profcil.errors import Diverged, Failure

POLL = 0.2  # seconds between two looks at the mailbox
PRIVATE = "*private"  # among what a client holds: the name of its private memory; no block is called that
ADVICE = "everything up to the last whole round is saved, start the nodes and run the same app again to go on"


class TooFew(Failure):
    """Not enough clients answered; the run can be taken up again."""


class Flower:
    """A fleet whose clients are nodes of a Flower federation."""

    def __init__(self, post: Post, roster: Roster, policy: Policy, facts: Mapping[str, str], note: Note) -> None:
        self.post, self.roster, self.policy, self.told, self.note = post, roster, policy, facts, note
        self.understudy = Understudy()
        self.begun = False

    # -- who is there -----------------------------------------------------------------------------------------------

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        """At the start everyone is waited for; later the round goes on with whoever is there, if they are enough."""
        need, until = min(self.policy.min_replies, len(clients)), time.monotonic() + self.policy.join
        while True:
            self.roster.look()
            here = [c for c in clients if self.roster.speaker(c) is not None]
            enough = len(here) == len(clients) or (self.begun and len(here) >= need)
            if enough or time.monotonic() > until:
                break
            time.sleep(POLL)
        if len(here) < need:
            raise TooFew(f"{len(here)} of {len(clients)} clients are there, {need} are needed; {ADVICE}")
        if absent := sorted(set(clients) - set(here)):
            self.note({"event": "absent", **place(when), "clients": absent})
        self.begun = True
        for c in here:
            self.reconcile(state, c)
        return here

    def reconcile(self, state: RunState, client: int) -> None:
        """A client that has just come holds what it says it holds, and only that."""
        if (holds := self.roster.fresh.pop(client, None)) is None:
            return
        blocks = state.server.blocks
        same = {n for n in holds if n in blocks and self.post.ready(n, blocks[n])[1] == holds[n]}
        state.held[client] = {n: v for n, v in state.held.get(client, {}).items() if n in same or n == PRIVATE}

    # -- asking -----------------------------------------------------------------------------------------------------

    def turns(self, world: World, method: Any, state: RunState, when: When, inboxes: Mapping) -> Mapping[int, Reply]:
        return self.ask("turn", world, method, state, when, inboxes)

    def surveys(self, world: World, method: Any, state: RunState, when: When, inboxes: Mapping) -> Mapping[int, Reply]:
        return self.ask("survey", world, method, state, when, inboxes)

    def ask(
        self, what: str, world: World, method: Any, state: RunState, when: When, inboxes: Mapping[int, Parcel]
    ) -> dict[int, Reply]:
        """Asks, and asks those again who have not answered while there are too few; gives up after some attempts."""
        if not inboxes:
            return {}
        limit, expect = self.policy.norm_limit, self.understudy.terms
        terms = {c: expect(what, world, method, when, c, inbox, limit) for c, inbox in inboxes.items()}
        done: dict[int, Reply] = {}
        need = min(self.policy.min_replies, len(inboxes))
        for attempt in range(self.policy.attempts):
            here = self.reach(world, state, when, [c for c in inboxes if c not in done]) if attempt else inboxes
            parcels = {c: whole(inboxes[c]) if attempt else inboxes[c] for c in here}
            asks = {c: self.ask_of(world, state, when, c, parcel) for c, parcel in parcels.items()}
            exchange = Exchange(what, when, asks, {c: terms[c] for c in here})
            self.run(exchange, world)
            self.book(exchange, state, again=attempt > 0)
            done |= exchange.done
            if len(done) >= need:
                return done
        raise TooFew(f"{len(done)} of {len(inboxes)} clients gave a usable reply, {need} are needed; {ADVICE}")

    def ask_of(self, world: World, state: RunState, when: When, client: int, parcel: Parcel) -> Ask:
        return Ask(
            client=client,
            when=when,
            names={n: self.post.ready(n, b)[1] for n, b in parcel.items()},
            blocks={n: parcel[n] for n in parcel.sent},
            ticket=state.held.get(client, {}).get(PRIVATE, 0),
            next=when.position * when.rounds + when.round + 1,
            seen=() if when.stage == "warmup" else tuple(sorted(world.plan.seen(when.position))),
            facts=self.told,
        )

    def run(self, exchange: Exchange, world: World) -> None:
        """Sends and waits until all have answered or the deadline has passed."""
        began = time.monotonic()
        nodes = {c: node for c in exchange.asks if (node := self.roster.speaker(c)) is not None}
        pending, exchange.wire["down"] = self.post.send(exchange.what, exchange.asks, nodes, 2 * self.policy.deadline)
        until = time.monotonic() + self.policy.deadline
        while True:
            for id, message in self.post.fetch(pending).items():
                client = pending.pop(id)
                if exchange.hear(client, message) == "diverged" and world.config.train.on_divergence == "fail":
                    raise Diverged(exchange.refused[client])
            if not pending or time.monotonic() > until:
                break
            time.sleep(POLL)
        for id, client in pending.items():  # greeted before they are asked again; should they answer, it is late
            self.post.late[id] = (client, exchange.when)
            self.roster.lose(nodes[client])
        self.note(exchange.told(time.monotonic() - began))

    def book(self, exchange: Exchange, state: RunState, again: bool) -> None:
        """What clients hold now, and what Flower added to the payload."""
        for c in exchange.kept:
            state.held[c] = {**state.held.get(c, {}), PRIVATE: exchange.asks[c].next}
        for c in (*exchange.silent, *exchange.refused):  # nobody knows what such a client has in hand
            state.held[c] = {n: v for n, v in state.held.get(c, {}).items() if n == PRIVATE}
        counted, payload = self.post.counted, exchange.payload
        counted["envelope_bytes"] += sum(exchange.wire.values()) - sum(payload.values())
        counted["resent_bytes"] += payload["down"] if again else 0
        counted["refused_replies"] += len(exchange.refused)
        counted["silent_clients"] += len(exchange.silent)

    def facts(self) -> Mapping[str, float]:
        return self.post.take_counts()


def whole(parcel: Parcel) -> Parcel:
    """All of it is sent: whoever is asked again may hold anything or nothing."""
    again = Parcel(parcel)
    again.sent = tuple(parcel)
    return again
