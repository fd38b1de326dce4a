"""Robust aggregation: which replies of a round a method gets to aggregate, and which clients are no longer asked.

A reply is dropped if its values are impossible (`reply_checks`) or out of range (`robust.screen`). The rule is then
applied to the others (`robust.aggregation`). A client whose replies were dropped in `quarantine` rounds of the stream
is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from profcil.engine.channel import Channel, Inbox, Reply, ServerState, When
from profcil.engine.encoding import LARGEST, ROUNDING
from profcil.engine.reply_checks import Knowledge, impossible
from profcil.robust.aggregation import robust_replies
from profcil.robust.directions import are_few, opposed, without_update

if TYPE_CHECKING:
    from profcil.engine.world import World


def knowledge(world: World, method: Any, when: When, client: int, inbox: Inbox) -> Knowledge:
    """What a client can know: classes that it has had so far or was sent, and at most as many examples as it has."""
    plan = world.plan
    observed = {y for p in range(when.position + 1) for y in plan.observed(client, p)}
    received = {y for b in inbox.values() for y in b.labels}
    examples = plan.clean.owned(client) if when.before_stream else plan.samples(client, when.position)
    confidence = float(getattr(method.params, "neighbours", 1.0))
    noised = world.protection is not None
    rounding = ROUNDING[world.config.channel.statistics]
    largest = LARGEST[world.config.channel.memory]
    return Knowledge(frozenset(observed | received), len(examples), confidence, noised, rounding, largest)


@torch.no_grad()
def admit(
    world: World,
    method: Any,
    channel: Channel,
    server: ServerState,
    when: When,
    inboxes: Mapping[int, Inbox],
    replies: Sequence[Reply],
) -> list[Reply]:
    """The replies that the method aggregates. The channel notes those that were dropped."""
    channel.dropped |= world.fleet.false_replies()
    possible = []
    for reply in replies:
        known = knowledge(world, method, when, reply.client, inboxes[reply.client])
        reason = next(impossible(reply, known), "")
        if reason:
            channel.dropped[reply.client] = reason
        else:
            possible.append(reply)
    rule = world.config.robust.aggregation
    kept, dropped = robust_replies(rule, possible, inboxes, server.blocks)
    channel.dropped |= dropped
    return without_opposed(channel, kept, inboxes, world.plan.clients) if rule == "clipped" else kept


def without_opposed(
    channel: Channel, replies: Sequence[Reply], inboxes: Mapping[int, Inbox], clients: int
) -> list[Reply]:
    """The replies, without the updates that point against the others, as long as few of all clients have had one."""
    found = opposed(replies, inboxes)
    channel.opposed.update(found)
    if not are_few(len(channel.opposed), clients):
        return list(replies)
    channel.pulled_back += found
    return [without_update(reply, inboxes[reply.client]) if reply.client in found else reply for reply in replies]


def still_asked(clients: Sequence[int], strikes: Mapping[int, int], quarantine: int) -> list[int]:
    """The clients that are not in quarantine; 0 means that there is none."""
    return [c for c in clients if not quarantine or strikes.get(c, 0) < quarantine]


def count_strikes(strikes: dict[int, int], dropped: Mapping[int, str], quarantine: int) -> dict[str, Any]:
    """Adds one strike to each client with a dropped reply in this round. Returns facts for the log."""
    if not dropped:
        return {}
    for client in dropped:
        strikes[client] = strikes.get(client, 0) + 1
    banned = [c for c in sorted(dropped) if strikes[c] == quarantine]
    facts: dict[str, Any] = {"dropped_replies": len(dropped), "dropped": {str(c): dropped[c] for c in sorted(dropped)}}
    return facts | ({"quarantined": banned} if banned else {})
