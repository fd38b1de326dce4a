"""The messages of a secure sum (docs/secure-sums.md) over Flower.

The first request is a usual one for a turn or a survey, with a `SumRequest`; the client's keys are in its response. The
other three exchanges are `SumMessage`s: a short header and one array of bytes. Its length is known to the receiver, and
compared before it is decoded. Within it, entries of a fixed size stand behind the ids of their clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from profcil.deploy.bounds import check_size, read_array, read_head
from profcil.deploy.wire import HEAD, PARSE_ERRORS, UnreadableMessage, header_record
from profcil.privacy.secure_sum.collection import ROUNDS
from profcil.privacy.secure_sum.protocol import ID_BYTES, KEYS_BYTES, SECRETS_BYTES
from profcil.privacy.secure_sum.shares import SHARE_BYTES

MESSAGE_TYPE = "query.sum"  # Flower's message type
DATA = "data"  # the name of the record and of its array
NPY_BYTES = 256  # more than the header of an array of bytes has
ASKED = {"shares": "keys", "masked": "shares", "recovery": "ids"}  # answer → what the message before it has
ENTRY_BYTES = {"keys": KEYS_BYTES, "shares": SECRETS_BYTES, "recovery": SHARE_BYTES}


@dataclass(frozen=True)
class SumMessage:
    """What is sent in one of the exchanges after the first, by the server or by a client."""

    client: int
    run: str
    sum: str  # the id of the sum
    stage: str  # of the client's answer: shares, masked or recovery
    data: bytes = b""
    error: str = ""  # of a client: why there is no answer


def sum_records(message: SumMessage) -> RecordDict:
    """A message as records."""
    head = {name: value for name, value in vars(message).items() if name != "data"}
    array = Array(np.frombuffer(message.data, np.uint8))
    return RecordDict({HEAD: header_record(head), DATA: ArrayRecord({DATA: array})})


def read_sum_head(content: RecordDict) -> SumMessage:
    """A message without its data, which are not decoded."""
    try:
        head = read_head(content, HEAD)
        message = SumMessage(
            client=int(head["client"]),  # this becomes part of a file name
            run=str(head["run"]),
            sum=str(head["sum"]),
            stage=str(head["stage"]),
            error=str(head["error"]),
        )
        if message.stage not in ROUNDS[1:]:
            raise ValueError("there is no such exchange in a secure sum")
        return message
    except PARSE_ERRORS as error:
        raise UnreadableMessage(f"the message cannot be read ({type(error).__name__}: {error})") from None


def read_data(content: RecordDict, most: int) -> bytes:
    """The bytes of a message, which may be at most so many."""
    try:
        check_size(content, most + NPY_BYTES)
        [record] = content.array_records.values()
        [array] = record.values()
        data = read_array(array)
        if data.dtype != np.uint8 or data.ndim != 1 or len(data) > most:
            raise ValueError(f"it has no array of at most {most} bytes")
        return data.tobytes()
    except PARSE_ERRORS as error:
        raise UnreadableMessage(f"the message cannot be read ({type(error).__name__}: {error})") from None


def joined(entries: Mapping[int, bytes]) -> bytes:
    """Entries behind the ids of their clients."""
    return b"".join(client.to_bytes(ID_BYTES, "big") + entry for client, entry in sorted(entries.items()))


def entries_size(stage: str, clients: int) -> int:
    """The length of `joined` for so many clients."""
    return clients * (ID_BYTES + ENTRY_BYTES.get(stage, 0))


def split(data: bytes, stage: str) -> dict[int, bytes]:
    """The entries of `joined`. Raises a ValueError for another length, or if a client occurs twice."""
    size = entries_size(stage, 1)
    if len(data) % size:
        raise ValueError(f"it has {len(data)} bytes, which is no multiple of {size}")
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    entries = {int.from_bytes(part[:ID_BYTES], "big"): part[ID_BYTES:] for part in parts}
    if len(entries) < len(parts):
        raise ValueError("a client occurs twice in it")
    return entries


def joined_ids(clients: Iterable[int]) -> bytes:
    """The ids of clients alone."""
    return joined(dict.fromkeys(clients, b""))
