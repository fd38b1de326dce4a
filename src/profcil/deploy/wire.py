"""Blocks, requests and responses as Flower records: tensors as arrays, the rest as one line of JSON, never pickle.

Flower splits large arrays into chunks itself. Received messages are bounded before they are decoded and checked as they
are read; `UnreadableMessage` says what is wrong with one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from profcil.deploy.bounds import check_size, read_array, read_head
from profcil.engine.channel import KINDS, Block, Inbox, Reply, When
from profcil.io.atomic_files import digest
from profcil.metrics.ledger import HEADER

HEAD = "head"  # the name of the record with the JSON header
BLOCK_PREFIX = "block:"  # starts the name of each record with a block's arrays
CONTENT_ERRORS = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, EOFError, OSError, RuntimeError)
PARSE_ERRORS = (*CONTENT_ERRORS, MemoryError)  # a header may claim any size; RecursionError is a RuntimeError


class UnreadableMessage(Exception):
    """A message that does not have the expected form."""


@dataclass(frozen=True)
class SumRequest:
    """A secure sum that clients are asked to add their replies to."""

    id: str
    members: tuple[int, ...]  # the clients that are asked
    classes: tuple[int, ...]  # of the rows by class
    shapes: Mapping[str, tuple[int, ...]]  # of the arrays, in the order in which they are added; none: no block is sent


@dataclass(frozen=True)
class Request:
    """What the server asks of a client. `digests` names the whole inbox; `blocks` has the part that had to be sent."""

    client: int
    when: When
    digests: Mapping[str, str]  # block → digest, in the order of the inbox
    blocks: Mapping[str, Block]
    private_id: int  # the private tensors to start from; 0 = none
    next_private_id: int  # the id under which the client stores its new private tensors
    seen: tuple[int, ...]  # Y^(p), which a client cannot compute from its own data alone
    facts: Mapping[str, str] = field(default_factory=dict)  # run, plan and data, which both sides must agree on
    patches: tuple[str, ...] = ()  # the blocks of which only the rows are sent that have changed
    sum: SumRequest | None = None  # the secure sum that the reply is for
    withheld: tuple[int, ...] | None = None  # classes that are rare in that sum; None = they were not counted


@dataclass(frozen=True)
class Response:
    """What a client sends: a reply, or one sentence that says why there is none."""

    reply: Reply
    when: When
    has_private: bool = False  # whether the client stored private tensors under the new id
    error: str = ""
    error_kind: str = ""  # "diverged", or "broken" for any other error
    sum_keys: bytes = b""  # in place of the content of the reply: the client's first message of a secure sum


def block_digest(block: Block) -> str:
    """A digest of a block's kind, labels and tensors. The version is left out."""
    tensors = {k: t.detach().cpu() for k, t in block.tensors.items()}
    return digest(tensors, f"{block.kind}{list(block.labels)}")


def to_array(tensor: Tensor) -> Array:
    return Array(tensor.detach().cpu().contiguous().numpy())


def to_array_record(block: Block) -> ArrayRecord:
    return ArrayRecord({name: to_array(t) for name, t in block.tensors.items()})


def block_headers(blocks: Mapping[str, Block]) -> dict[str, Any]:
    return {name: [b.kind, list(b.labels), b.version] for name, b in blocks.items()}


def pack(head: Mapping[str, Any], blocks: Mapping[str, Block], arrays: Mapping[str, ArrayRecord] | None = None) -> Any:
    """A header and blocks as records. `arrays` holds records that were already made for another receiver."""
    known = arrays or {}
    records = {BLOCK_PREFIX + name: known.get(name) or to_array_record(b) for name, b in blocks.items()}
    return RecordDict({HEAD: header_record({**head, "blocks": block_headers(blocks)}), **records})


def header_record(head: Mapping[str, Any]) -> ConfigRecord:
    return ConfigRecord({"json": json.dumps(head)})


def unpack(content: RecordDict, most: float = math.inf) -> tuple[dict[str, Any], dict[str, Block]]:
    """The header and blocks that `pack` was given. Anything else, or more bytes than `most`, raises
    `UnreadableMessage`."""
    try:
        check_size(content, most)
        head = read_head(content, HEAD)
        records = {key.removeprefix(BLOCK_PREFIX): r for key, r in content.array_records.items()}
        if set(records) != set(head["blocks"]):
            raise ValueError("the header and the arrays name different blocks")
        return head, {name: read_block(name, header, records[name]) for name, header in head["blocks"].items()}
    except PARSE_ERRORS as error:
        raise UnreadableMessage(f"the message cannot be read ({type(error).__name__}: {error})") from None


def read_block(name: str, header: list[Any], record: ArrayRecord) -> Block:
    kind, labels, version = header
    if kind not in (*KINDS, HEADER) or not all(type(y) is int for y in labels):
        raise ValueError(f"block {name} has an unknown kind, or labels that are not class ids")
    tensors = {k: torch.from_numpy(read_array(a)) for k, a in record.items()}
    return Block(kind, tensors, tuple(labels), int(version))


def request_records(request: Request, arrays: Mapping[str, ArrayRecord] | None = None) -> RecordDict:
    head = {
        "client": request.client,
        "when": vars(request.when),
        "names": dict(request.digests),
        "ticket": request.private_id,
        "next": request.next_private_id,
        "seen": list(request.seen),
        "facts": dict(request.facts),
    }
    if request.patches:
        head["patches"] = list(request.patches)
    if request.sum:
        head["sum"] = vars(request.sum)
    if request.withheld is not None:
        head["withheld"] = list(request.withheld)
    return pack(head, request.blocks, arrays)


def read_request(content: RecordDict) -> Request:
    head, blocks = unpack(content)
    try:
        return Request(
            client=int(head["client"]),  # this and the two ids become parts of file names
            when=When(**head["when"]),
            digests={str(k): str(v) for k, v in head["names"].items()},
            blocks=blocks,
            private_id=int(head["ticket"]),
            next_private_id=int(head["next"]),
            seen=tuple(map(int, head["seen"])),
            patches=tuple(map(str, head.get("patches", ()))),
            facts={str(k): str(v) for k, v in head["facts"].items()},
            sum=read_sum_request(head["sum"]) if "sum" in head else None,
            withheld=tuple(map(int, head["withheld"])) if "withheld" in head else None,
        )
    except PARSE_ERRORS as error:
        raise UnreadableMessage(f"the message is not a request ({type(error).__name__}: {error})") from None


def read_sum_request(found: Mapping[str, Any]) -> SumRequest:
    shapes = {str(name): tuple(map(int, shape)) for name, shape in found["shapes"].items()}
    return SumRequest(str(found["id"]), tuple(map(int, found["members"])), tuple(map(int, found["classes"])), shapes)


def response_records(response: Response) -> RecordDict:
    reply = response.reply
    head = {
        "client": reply.client,
        "samples": reply.samples,
        "notes": dict(reply.notes),
        "when": vars(response.when),
        "kept": response.has_private,
        "trouble": response.error,
        "kind": response.error_kind,
    }
    if response.sum_keys:
        head["keys"] = response.sum_keys.hex()
    return pack(head, reply.blocks)


def read_response(content: RecordDict, most: float = math.inf) -> Response:
    """The response in a message of at most `most` bytes."""
    head, blocks = unpack(content, most)
    try:
        notes = {str(k): float(v) for k, v in head["notes"].items()}
        return Response(
            reply=Reply(int(head["client"]), int(head["samples"]), blocks, notes=notes),
            when=When(**head["when"]),
            has_private=bool(head["kept"]),
            error=str(head["trouble"]),
            error_kind=str(head["kind"]),
            sum_keys=bytes.fromhex(head.get("keys", "")),
        )
    except PARSE_ERRORS as error:
        raise UnreadableMessage(f"the message is not a response ({type(error).__name__}: {error})") from None


def wire_bytes(messages: Iterable[Message]) -> int:
    """The size of messages as Flower serialises them, without HTTP and TLS. Shared objects count once per message."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return sum(len(o.deflate()) for m in messages for o in get_all_nested_objects(m).values())


def payload_bytes(blocks: Inbox) -> int:
    """The size of blocks as the ledger counts it."""
    return sum(b.bytes + b.header_bytes for b in blocks.values())
