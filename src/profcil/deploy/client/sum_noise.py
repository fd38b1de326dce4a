"""The noise that a site adds to its numbers in a secure sum. All that its size depends on is known to the site itself.

The settings of the app give the noise of a sum, and the least number of clients that stay in a sum of n; from the
method follow the arrays. The server says who is asked. A sum of more clients than take part in a round is refused: a
share for so many would leave a sum of few with too little noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from profcil.deploy.client.spent import Release, release_at
from profcil.deploy.wire import Request, SumRequest
from profcil.engine.channel import Inbox
from profcil.engine.client import Client
from profcil.engine.expected_reply import complete_reply
from profcil.engine.summed_replies import layout_of, sum_noise
from profcil.engine.world import World
from profcil.errors import Failure
from profcil.privacy.protection import Protection
from profcil.privacy.secure_sum.fixed_point import Ring
from profcil.privacy.summed_noise import SumNoise, name_of_part, name_of_sum, with_noise


@dataclass(frozen=True)
class OwnShare:
    """A client's share of the noise of a sum."""

    name: str  # of the sum
    noise: SumNoise
    protection: Protection
    secret: int  # from which it is drawn

    def added(self, vector: Ring, request: Request) -> tuple[Ring, Release]:
        """The numbers with the share, and what they count as."""
        asked = request.sum
        assert asked is not None
        name = name_of_part(self.name, request.client, vector)
        noised = with_noise(vector, asked.shapes, self.noise, self.secret, name)
        return noised, release_at(self.protection, name, request.client, request.when, self.name)


def own_share(world: World, method: Any, client: Client, inbox: Inbox, request: Request) -> OwnShare | None:
    """The share of a client in the sum that it is asked for; None if the sum has no noise."""
    asked = request.sum
    protection = world.protection
    if asked is None or protection is None or not asked.shapes:
        return None
    check_size(asked, request.client, world)
    expected = complete_reply(world, method, client, inbox, asked.classes)
    layout = layout_of(expected, method.additive, asked.classes)
    if list(layout.shapes.items()) != list(asked.shapes.items()):
        raise Failure(
            f"client {request.client} is asked for a secure sum of other arrays than {world.config.method} adds here, "
            "and it knows the noise of those alone; give server and site the same version of profcil"
        )
    noise = sum_noise(protection, layout, world.config.privacy, request.when, len(asked.members), inbox)
    name = name_of_sum(request.when, asked.members, inbox, noise)
    return OwnShare(name, noise, protection, world.config.seed if world.secret is None else world.secret)


def check_size(asked: SumRequest, client: int, world: World) -> None:
    """Refuses a sum of more clients than can take part, and classes that do not exist."""
    most = world.config.stream.participants
    if len(asked.members) > most:
        raise Failure(
            f"client {client} is asked for a secure sum of {len(asked.members)} clients, where stream.participants = "
            f"{most}: with a share for so many, a sum of those that exist would have too little noise"
        )
    if not set(asked.classes) <= set(range(world.net.classes)):
        raise Failure(f"client {client} is asked for a secure sum with classes that do not exist")
