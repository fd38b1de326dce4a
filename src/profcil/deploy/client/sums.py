"""The client's part of a secure sum over Flower. Each message may be handled by a new process.

What a client must know until its next message is in two files of its own folder: the secrets, which come from the
operating system's random source, and the numbers to be added. Before an answer leaves the site, the files hold what the
next one needs and no more; with the last answer they are gone. So no message is answered twice, and the secrets of a
client are revealed for one set of survivors.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from profcil.deploy.client.spent import Release
from profcil.deploy.client.store import SiteStore
from profcil.deploy.client.sum_noise import OwnShare
from profcil.deploy.sum_messages import ASKED, SumMessage, entries_size, joined, split
from profcil.deploy.wire import Request, SumRequest
from profcil.engine.channel import Reply
from profcil.engine.summed_replies import Additive, arrays_of, terms_of, vector_of
from profcil.errors import Failure
from profcil.io.atomic_files import write_bytes, write_json
from profcil.privacy.secure_sum import protocol
from profcil.privacy.secure_sum.fixed_point import Ring, from_bytes, to_bytes
from profcil.privacy.secure_sum.protocol import ClientState, Terms
from profcil.privacy.settings import PrivacySettings

FOLLOWING = {"shares": "masked", "masked": "recovery"}
HEX = ("mask_key", "share_key", "seed")  # the secrets of a client's own
ID_LIMIT = 2**32


def draw(purpose: str, size: int) -> bytes:
    """Random bytes from the operating system."""
    return secrets.token_bytes(size)


@dataclass(frozen=True)
class OpenSum:
    """A sum that a client takes part in."""

    id: str
    stage: str  # of the next answer
    members: tuple[int, ...]
    state: ClientState
    release: Release | None = None  # what it counts as, if there is noise

    def to_json(self) -> dict[str, Any]:
        s = self.state
        own = {name: getattr(s, name).hex() for name in HEX}
        others = {name: {str(c): m.hex() for c, m in getattr(s, name).items()} for name in ("keys", "held")}
        facts = {"id": self.id, "stage": self.stage, "members": list(self.members), "client": s.id}
        spending = {"release": vars(self.release)} if self.release else {}
        return {**facts, "terms": vars(s.terms), **own, **others, **spending}


def open_sum_of_json(found: Mapping[str, Any]) -> OpenSum:
    mask_key, share_key, seed = (bytes.fromhex(found[name]) for name in HEX)
    keys, held = ({int(c): bytes.fromhex(m) for c, m in found[name].items()} for name in ("keys", "held"))
    state = ClientState(found["client"], Terms(**found["terms"]), mask_key, share_key, seed, draw, keys, held)
    release = Release(**found["release"]) if "release" in found else None
    return OpenSum(found["id"], found["stage"], tuple(found["members"]), state, release)


# -- the first message ------------------------------------------------------------------------------------------------


def begin_sum(
    store: SiteStore,
    request: Request,
    reply: Reply,
    additive: Additive,
    settings: PrivacySettings,
    share: OwnShare | None = None,
) -> bytes:
    """Stores the numbers that a reply adds to a sum, with its share of the noise, and new secrets. Returns the client's
    keys; none if the sum has no numbers. A sum that was open before is given up."""
    asked = request.sum
    assert asked is not None
    store.forget_sum()
    check_members(asked, request.client, settings)
    terms = terms_of(settings, len(asked.members), request.when)
    vector = own_numbers(request, reply, additive, settings, terms.width, share is not None)
    if not asked.shapes:
        return b""
    release = None
    if share:
        vector, release = share.added(vector, request)
        release.check(store.spent)
    state, keys = protocol.advertise(request.client, terms, draw)
    state = replace(state, keys={request.client: keys})  # to recognise its own among those of all
    write_bytes(store.sum_vector, to_bytes(vector, terms.width))
    write_json(store.sum_state, OpenSum(asked.id, "shares", asked.members, state, release).to_json())
    return keys


def own_numbers(
    request: Request, reply: Reply, additive: Additive, settings: PrivacySettings, width: int, noised: bool
) -> Ring:
    """The numbers that a reply adds to a sum. Where noise is to hide them, an error does not say their size."""
    asked = request.sum
    assert asked is not None
    arrays = arrays_of(reply, additive, asked.classes)
    try:
        return vector_of(arrays, asked.shapes, settings, len(asked.members), request.client, width)
    except Failure:
        if not noised:
            raise
        raise Failure(
            f"client {request.client} has numbers that do not fit into the secure sum; lower privacy.sum_bits"
        ) from None


def check_members(asked: SumRequest, client: int, settings: PrivacySettings) -> None:
    """Refuses a sum of too few clients, or of clients that cannot be told apart."""
    members = set(asked.members)
    if len(members) < len(asked.members) or client not in members or not all(0 <= c < ID_LIMIT for c in members):
        raise Failure(f"client {client} is asked for a secure sum of the clients {list(asked.members)[:20]}")
    if len(members) < settings.sum_clients and asked.shapes:
        raise Failure(
            f"client {client} is asked for a secure sum of {len(members)} clients, and privacy.sum_clients = "
            f"{settings.sum_clients}"
        )


# -- the other messages -----------------------------------------------------------------------------------------------


def answer(store: SiteStore, message: SumMessage, data: bytes) -> bytes:
    """The client's answer to a message. The sum is given up if the message is wrong."""
    found = take_sum(store, message)
    try:
        entries = split(data, ASKED[message.stage])
        after, answered = STEPS[message.stage](store, found, entries)
    except ValueError as error:
        store.forget_sum()
        raise Failure(f"a message of the secure sum is wrong: {error}") from None
    except Failure:
        store.forget_sum()
        raise
    if after is None:
        store.forget_sum()
    else:
        write_json(store.sum_state, replace(found, stage=FOLLOWING[found.stage], state=after).to_json())
    return answered


def open_sum(store: SiteStore, message: SumMessage) -> OpenSum:
    """The open sum that a message belongs to. Messages of an earlier sum and repeated messages are refused."""
    try:
        found = open_sum_of_json(json.loads(store.sum_state.read_bytes()))
    except (OSError, ValueError, KeyError):
        found = None
    if found is None or found.id != message.sum or found.state.id != message.client:
        raise Failure(
            f"client {message.client} takes part in no such secure sum: it has ended, or the message has come before"
        )
    if found.stage != message.stage:
        raise Failure(
            f"client {message.client} is asked for its {message.stage} in a secure sum, but its next answer is its "
            f"{found.stage}"
        )
    return found


def take_sum(store: SiteStore, message: SumMessage) -> OpenSum:
    """The open sum that a message belongs to. Its file is removed: of two messages at one time, one finds it."""
    taken = store.sum_state.with_suffix(f".{secrets.token_hex(4)}")
    open_sum(store, message)
    try:
        os.rename(store.sum_state, taken)
        found = open_sum_of_json(json.loads(taken.read_bytes()))
    except OSError:
        raise Failure(f"client {message.client} has answered this message of a secure sum before") from None
    taken.unlink()
    return found


def longest_message(store: SiteStore, message: SumMessage) -> int:
    """The bytes that the data of a message may have."""
    return entries_size(ASKED[message.stage], len(open_sum(store, message).members))


def share(store: SiteStore, found: OpenSum, keys: Mapping[int, bytes]) -> tuple[ClientState, bytes]:
    """The encrypted shares of the client's secrets."""
    own = found.state.keys[found.state.id]
    if set(keys) - set(found.members):
        raise Failure(f"the secure sum has keys of client {min(set(keys) - set(found.members))}, which was not asked")
    if keys.get(found.state.id) != own:
        raise Failure(f"the secure sum has other keys of client {found.state.id} than it has sent")
    state, encrypted = protocol.share_secrets(found.state, keys)
    return state, joined(encrypted)


def mask(store: SiteStore, found: OpenSum, encrypted: Mapping[int, bytes]) -> tuple[ClientState, bytes]:
    """The client's masked numbers. Of its secrets nothing is needed any more but what it holds of others."""
    others = set(found.state.keys) - {found.state.id}
    if set(encrypted) - others:
        raise Failure(f"the secure sum has shares of client {min(set(encrypted) - others)}, which sent no keys")
    vector = from_bytes(store.sum_vector.read_bytes(), found.state.terms.width)
    state, masked = protocol.mask(found.state, encrypted, vector)
    store.sum_vector.unlink()
    return replace(state, mask_key=b"", share_key=b"", seed=b"", keys={}), to_bytes(masked, state.terms.width)


def recover(store: SiteStore, found: OpenSum, arrived: Mapping[int, bytes]) -> tuple[None, bytes]:
    """One share of each client: of its seed if its numbers have arrived, else of its mask key."""
    if set(arrived) - set(found.state.held):
        raise Failure(
            f"the secure sum has numbers of client {min(set(arrived) - set(found.state.held))}, which sent no shares"
        )
    if found.release:
        found.release.note(store.spent, arrived)
    _, revealed = protocol.reveal(found.state, arrived)
    return None, joined(revealed)


STEPS: Mapping[str, Any] = {"shares": share, "masked": mask, "recovery": recover}
