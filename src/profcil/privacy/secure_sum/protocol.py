"""The protocol of Bonawitz et al. (2017) against a server that is honest but curious, as functions of plain values.

    round      a client sends                                        the server sends to each client
    keys       two public keys and a digest of its own seed          all of these
    shares     shares of its seed and of its mask key, encrypted     the shares that are meant for it
    masked     its vector + own mask ± a mask with each other client the clients whose vectors have arrived
    recovery   shares of the seeds of these clients, and of the mask
               keys of those whose vectors are missing

The masks of pairs cancel in the sum. The server removes the own masks, and the masks of pairs with a missing client, by
the secrets that it recovers from `threshold` shares. It gets the seed of a client or its mask key, never both, so the
vector of a client stays hidden even if it arrives late. A client may stop after any round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from profcil.errors import Failure
from profcil.privacy.secure_sum import masks, shares
from profcil.privacy.secure_sum.fixed_point import WIDEST, Ring
from profcil.privacy.secure_sum.masks import KEY_BYTES
from profcil.privacy.secure_sum.shares import SHARE_BYTES, Draw

Messages = Mapping[int, bytes]  # by client
ID_BYTES = 4  # of a client's id in front of its message
KEYS_BYTES = 2 * KEY_BYTES + 32  # two public keys and a digest
SECRETS_BYTES = 2 * SHARE_BYTES + 16  # two shares and the tag of the cipher
NONCE = bytes(12)  # each key encrypts one message


class SumFailed(Failure):
    """A secure sum that cannot be completed. No vector has been revealed."""


@dataclass(frozen=True)
class Terms:
    """What all members of a sum know beforehand."""

    name: str  # differs from sum to sum
    threshold: int  # shares that recover a secret
    least: int  # clients that a sum must have
    width: int = WIDEST  # bytes of a number

    @property
    def needed(self) -> int:
        """Clients that must stay to the end."""
        return max(self.threshold, self.least)


@dataclass(frozen=True)
class ClientState:
    """What a client keeps during one sum."""

    id: int
    terms: Terms
    mask_key: bytes
    share_key: bytes
    seed: bytes  # of the client's own mask
    draw: Draw
    keys: Messages = field(default_factory=dict)  # of all clients
    held: Messages = field(default_factory=dict)  # a share of the mask key and one of the seed, of each client


def size_of(messages: Messages) -> int:
    """The bytes of some messages with the ids of their clients."""
    return sum(ID_BYTES + len(message) for message in messages.values())


def check_enough(clients: Collection[int], terms: Terms, action: str) -> None:
    """Raises an error if so few clients are left that a sum would fail or reveal too much."""
    if len(clients) < terms.needed:
        raise SumFailed(
            f"the secure sum of {terms.name} was given up: {len(clients)} clients {action}, {terms.needed} are needed; "
            "no reply was revealed, resume the run when more clients can take part"
        )


# -- the client -------------------------------------------------------------------------------------------------------


def advertise(client: int, terms: Terms, draw: Draw) -> tuple[ClientState, bytes]:
    """Draws the client's keys and seed. Returns its message to all: two public keys and a digest of the seed."""
    mask_key = draw("mask key", KEY_BYTES)
    share_key = draw("share key", KEY_BYTES)
    seed = draw("seed", KEY_BYTES)
    state = ClientState(client, terms, mask_key, share_key, seed, draw)
    message = masks.public_key(mask_key) + masks.public_key(share_key) + digest(seed)
    return state, message


def share_secrets(state: ClientState, keys: Messages) -> tuple[ClientState, dict[int, bytes]]:
    """Returns the encrypted shares for each other client."""
    check_enough(keys, state.terms, "sent keys")
    points = {client: client + 1 for client in keys}
    secrets = {"key": state.mask_key, "seed": state.seed}
    split = {}
    for name, secret in secrets.items():
        draw = named_draw(state.draw, name)
        split[name] = shares.split(secret, points.values(), state.terms.threshold, draw)
    both = {client: split["key"][point] + split["seed"][point] for client, point in points.items()}
    state = replace(state, keys=dict(keys), held={state.id: both[state.id]})
    others = [client for client in keys if client != state.id]
    return state, {client: cipher(state, state.id, client).encrypt(NONCE, both[client], None) for client in others}


def mask(state: ClientState, encrypted: Messages, vector: Ring) -> tuple[ClientState, Ring]:
    """Returns the client's vector with its masks: its own, and one with each client that has sent shares."""
    check_enough({state.id, *encrypted}, state.terms, "sent shares")
    held = {client: decrypt(state, client, message) for client, message in encrypted.items()}
    masked = vector + masks.stream(state.seed, state.terms.name, len(vector), state.terms.width)
    for other in held:
        add_pair_mask(masked, state.mask_key, state.keys[other], state.terms, state.id < other)
    return replace(state, held={**state.held, **held}), masked


def reveal(state: ClientState, arrived: Collection[int]) -> tuple[ClientState, dict[int, bytes]]:
    """Returns a share of each client's seed, or of its mask key if its vector is missing. The client then deletes all
    shares, so that it never reveals both of one client."""
    check_enough(arrived, state.terms, "sent a vector")
    revealed = {}
    for client, both in state.held.items():
        revealed[client] = both[SHARE_BYTES:] if client in arrived else both[:SHARE_BYTES]
    return replace(state, held={}), revealed


def decrypt(state: ClientState, sender: int, message: bytes) -> bytes:
    """The shares in a message of another client."""
    try:
        return cipher(state, sender, state.id).decrypt(NONCE, message, None)
    except InvalidTag:
        raise SumFailed(
            f"the secure sum of {state.terms.name} was given up: the shares of client {sender} for client {state.id} "
            "were changed on the way; no reply was revealed"
        ) from None


def cipher(state: ClientState, sender: int, receiver: int) -> ChaCha20Poly1305:
    """The cipher for the shares that one client sends to another; `state` is of one of the two."""
    other = receiver if sender == state.id else sender
    public = state.keys[other][KEY_BYTES : 2 * KEY_BYTES]
    secret = masks.agree(state.share_key, public)
    return ChaCha20Poly1305(masks.derive_key(secret, f"shares {state.terms.name} {sender} {receiver}", 32))


# -- the server -------------------------------------------------------------------------------------------------------


def deliver(encrypted: Mapping[int, Messages]) -> dict[int, dict[int, bytes]]:
    """The encrypted shares by receiver, from those by sender. Only clients that sent some receive any."""
    return {
        receiver: {sender: messages[receiver] for sender, messages in encrypted.items() if sender != receiver}
        for receiver in encrypted
    }


def unmask(
    terms: Terms, keys: Messages, masked: Mapping[int, Ring], sharing: Sequence[int], revealed: Mapping[int, Messages]
) -> Ring:
    """The sum of the vectors that have arrived. `sharing` are the clients that sent shares, of which some may be
    missing in `masked`; `revealed` are the shares by the client that sent them."""
    check_enough(revealed, terms, "helped to remove the masks")
    first, *rest = masked.values()
    total = first.copy()
    for vector in rest:
        total += vector
    for client in sharing:
        secret = recover_secret(terms, keys, client, client in masked, revealed)
        if client in masked:
            total -= masks.stream(secret, terms.name, len(total), terms.width)
        else:
            for other in masked:
                add_pair_mask(total, secret, keys[other], terms, client < other)
    return total


def recover_secret(terms: Terms, keys: Messages, client: int, arrived: bool, revealed: Mapping[int, Messages]) -> bytes:
    """The seed of a client, or its mask key if its vector is missing. It must agree with the client's first message."""
    found = {helper + 1: messages[client] for helper, messages in sorted(revealed.items())}
    chosen = dict(list(found.items())[: terms.threshold])
    known = keys[client][2 * KEY_BYTES :] if arrived else keys[client][:KEY_BYTES]
    try:
        secret = shares.recover(chosen)
        made = digest(secret) if arrived else masks.public_key(secret)
    except Failure:
        made = b""
    if made != known:
        raise SumFailed(
            f"the secure sum of {terms.name} was given up: the shares of client {client}'s secret do not fit its "
            "keys, so one of them is wrong; resume the run"
        )
    return secret


# -- both -------------------------------------------------------------------------------------------------------------


def add_pair_mask(vector: Ring, mask_key: bytes, keys: bytes, terms: Terms, positive: bool) -> None:
    """Adds the mask of two clients to a vector, or subtracts it. One of them is given by its mask key, the other by its
    public keys."""
    secret = masks.agree(mask_key, keys[:KEY_BYTES])
    stream = masks.stream(secret, terms.name, len(vector), terms.width)
    if positive:
        vector += stream
    else:
        vector -= stream


def digest(seed: bytes) -> bytes:
    """The digest by which a recovered seed is checked."""
    return hashlib.sha256(seed).digest()


def named_draw(draw: Draw, name: str) -> Draw:
    """Random bytes for purposes under a name."""
    return lambda purpose, size: draw(f"{name} {purpose}", size)
