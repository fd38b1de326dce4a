"""All parties of a secure sum in one process. Every message has the bytes that it would have over a network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from profcil.privacy.secure_sum import protocol
from profcil.privacy.secure_sum.fixed_point import Ring
from profcil.privacy.secure_sum.protocol import ID_BYTES, Terms, size_of
from profcil.privacy.secure_sum.shares import Draw

ROUNDS = ("keys", "shares", "masked", "recovery")  # also the kinds under which the ledger counts their bytes


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


def add_securely(
    vectors: Mapping[int, Ring],
    terms: Terms,
    draw: Callable[[int], Draw],
    lost: Mapping[str, Collection[int]] | None = None,
) -> SecureSum:
    """The sum of the clients' vectors by the protocol. `draw` gives the random bytes of a client; `lost` names clients
    that stop before they send their message of a round."""
    gone = lost or {}
    sent: list[Sent] = []
    states = {}
    keys = {}
    for client in present(vectors, gone, "keys"):
        states[client], keys[client] = protocol.advertise(client, terms, draw(client))
        sent.append(Sent(client, "up", "keys", len(keys[client])))
    sent += [Sent(client, "down", "keys", size_of(keys)) for client in keys]
    encrypted = {}
    for client in present(keys, gone, "shares"):
        states[client], encrypted[client] = protocol.share_secrets(states[client], keys)
        sent.append(Sent(client, "up", "shares", size_of(encrypted[client])))
    delivered = protocol.deliver(encrypted)
    sent += [Sent(client, "down", "shares", size_of(messages)) for client, messages in delivered.items()]
    masked = {}
    for client in present(encrypted, gone, "masked"):
        states[client], masked[client] = protocol.mask(states[client], delivered[client], vectors[client])
        sent.append(Sent(client, "up", "masked", masked[client].nbytes))
    sent += [Sent(client, "down", "recovery", ID_BYTES * len(masked)) for client in masked]
    revealed = {}
    for client in present(masked, gone, "recovery"):
        states[client], revealed[client] = protocol.reveal(states[client], masked)
        sent.append(Sent(client, "up", "recovery", size_of(revealed[client])))
    total = protocol.unmask(terms, keys, masked, sorted(encrypted), revealed)
    return SecureSum(total, tuple(sorted(masked)), sent)


def present(clients: Collection[int], gone: Mapping[str, Collection[int]], round: str) -> list[int]:
    """The clients that send their message of a round, of those that sent one in the round before."""
    return [client for client in sorted(clients) if client not in gone.get(round, ())]
