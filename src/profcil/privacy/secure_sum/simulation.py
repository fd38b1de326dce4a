"""All parties of a secure sum in one process. Every message has the bytes that it would have over a network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from profcil.privacy.secure_sum import protocol
from profcil.privacy.secure_sum.collection import ROUNDS, SecureSum, collect
from profcil.privacy.secure_sum.fixed_point import Ring, to_bytes
from profcil.privacy.secure_sum.protocol import ClientState, Messages, Terms
from profcil.privacy.secure_sum.shares import Draw

__all__ = ["ROUNDS", "LocalMembers", "SecureSum", "add_securely"]
Lost = Mapping[str, Collection[int]]


@dataclass
class LocalMembers:
    """Clients in this process. `lost` names those that stop before they send their message of a round."""

    vectors: Mapping[int, Ring]
    terms: Terms
    draw: Callable[[int], Draw]
    lost: Lost
    states: dict[int, ClientState] = field(default_factory=dict)

    def present(self, clients: Collection[int], round: str) -> list[int]:
        """The clients that send their message of a round."""
        return [client for client in sorted(clients) if client not in self.lost.get(round, ())]

    def keys(self) -> dict[int, bytes]:
        sent = {}
        for client in self.present(self.vectors, "keys"):
            self.states[client], sent[client] = protocol.advertise(client, self.terms, self.draw(client))
        return sent

    def shares(self, keys: Messages) -> dict[int, Messages]:
        sent: dict[int, Messages] = {}
        for client in self.present(keys, "shares"):
            self.states[client], sent[client] = protocol.share_secrets(self.states[client], keys)
        return sent

    def masked(self, delivered: Mapping[int, Messages]) -> dict[int, bytes]:
        sent = {}
        for client in self.present(delivered, "masked"):
            vector = self.vectors[client]
            self.states[client], masked = protocol.mask(self.states[client], delivered[client], vector)
            sent[client] = to_bytes(masked, self.terms.width)
        return sent

    def recovery(self, arrived: Collection[int]) -> dict[int, Messages]:
        sent: dict[int, Messages] = {}
        for client in self.present(arrived, "recovery"):
            self.states[client], sent[client] = protocol.reveal(self.states[client], arrived)
        return sent


def add_securely(
    vectors: Mapping[int, Ring], terms: Terms, draw: Callable[[int], Draw], lost: Lost | None = None
) -> SecureSum:
    """The sum of the clients' vectors by the protocol. `draw` gives the random bytes of a client."""
    return collect(terms, LocalMembers(vectors, terms, draw, lost or {}), [])
