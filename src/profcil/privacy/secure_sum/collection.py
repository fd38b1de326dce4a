"""The server's part of a secure sum: four exchanges with the clients, wherever these are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from profcil.privacy.secure_sum import protocol
from profcil.privacy.secure_sum.fixed_point import Ring, from_bytes
from profcil.privacy.secure_sum.protocol import ID_BYTES, Messages, Terms, check_enough, size_of

Message = TypeVar("Message")
ROUNDS = ("keys", "shares", "masked", "recovery")  # also the kinds under which the ledger counts their bytes


class Members(Protocol):
    """The clients of a sum. Each method sends one message to each of some clients. It returns what they answered; a
    client that has stopped is missing."""

    def keys(self) -> Mapping[int, bytes]: ...

    def shares(self, keys: Messages) -> Mapping[int, Messages]: ...

    def masked(self, delivered: Mapping[int, Messages]) -> Mapping[int, bytes]: ...

    def recovery(self, arrived: Collection[int]) -> Mapping[int, Messages]: ...


@dataclass(frozen=True)
class Sent:
    """The bytes of one message."""

    client: int
    direction: str  # up or down
    kind: str  # one of `ROUNDS`
    bytes: int


@dataclass
class SecureSum:
    """The sum, the clients whose vectors are in it, and all messages."""

    total: Ring
    clients: tuple[int, ...]
    sent: list[Sent] = field(default_factory=list)


def collect(terms: Terms, members: Members, sent: list[Sent]) -> SecureSum:
    """The sum of the members' vectors. All messages are added to `sent`, also those of a sum that fails."""
    keys = in_order(members.keys())
    sent += [Sent(client, "up", "keys", len(message)) for client, message in keys.items()]
    check_enough(keys, terms, "sent keys")
    sent += [Sent(client, "down", "keys", size_of(keys)) for client in keys]
    encrypted = in_order(members.shares(keys))
    sent += [Sent(client, "up", "shares", size_of(messages)) for client, messages in encrypted.items()]
    check_enough(encrypted, terms, "sent shares")
    delivered = protocol.deliver(encrypted)
    sent += [Sent(client, "down", "shares", size_of(messages)) for client, messages in delivered.items()]
    masked = in_order(members.masked(delivered))
    sent += [Sent(client, "up", "masked", len(vector)) for client, vector in masked.items()]
    check_enough(masked, terms, "sent a vector")
    sent += [Sent(client, "down", "recovery", ID_BYTES * len(masked)) for client in masked]
    revealed = in_order(members.recovery(list(masked)))
    sent += [Sent(client, "up", "recovery", size_of(messages)) for client, messages in revealed.items()]
    vectors = {client: from_bytes(vector, terms.width) for client, vector in masked.items()}
    total = protocol.unmask(terms, keys, vectors, list(encrypted), revealed)
    return SecureSum(total, tuple(masked), sent)


def in_order(messages: Mapping[int, Message]) -> dict[int, Message]:
    """The messages by client, ascending."""
    return {client: messages[client] for client in sorted(messages)}
