"""Blocks, asks and replies as Flower records: tensors as arrays, the rest as one line of JSON, never pickle.

Flower cuts arrays into chunks itself, so a large model needs no care here. What comes from outside is checked as it is
read; `Unreadable` says what was wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from profcil.engine.channel import When
from profcil.engine.payload import KINDS, Block, Inbox, Reply
from profcil.io.atomic_files import digest

HEAD, BLOCK = "head", "block:"
BROKEN = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, EOFError, OSError, RuntimeError)


class Unreadable(Exception):
    """A message that is not what it should be."""


@dataclass(frozen=True)
class Ask:
    """What a client is asked to do. `names` is its whole inbox; only `blocks` had to be sent."""

    client: int
    when: When
    names: Mapping[str, str]  # block → digest, in the order of the inbox
    blocks: Mapping[str, Block]
    ticket: int  # which of its private memories the client is to go on from; 0 = none
    next: int  # the name of the one it will have afterwards
    seen: tuple[int, ...]  # Y^(p), which a client that knows only its own data cannot work out
    facts: Mapping[str, str] = field(default_factory=dict)  # run, plan and data: both ends must mean the same


@dataclass(frozen=True)
class Answer:
    """What a client says: a reply, or one sentence why there is none."""

    reply: Reply
    when: When
    kept: bool = False  # whether it has a private memory under the new name
    trouble: str = ""
    kind: str = ""  # of the trouble: lacking, mismatch, diverged


def seal(block: Block) -> str:
    """A digest of everything a block says but its version."""
    tensors = {k: t.detach().cpu() for k, t in block.tensors.items()}
    return digest(tensors, f"{block.kind}{list(block.labels)}")


def array_of(tensor: Tensor) -> Array:
    return Array(tensor.detach().cpu().contiguous().numpy())


def record_of(block: Block) -> ArrayRecord:
    return ArrayRecord({name: array_of(t) for name, t in block.tensors.items()})


def head_of(blocks: Mapping[str, Block]) -> dict[str, Any]:
    return {n: [b.kind, list(b.labels), b.version] for n, b in blocks.items()}


def pack(head: Mapping[str, Any], blocks: Mapping[str, Block], arrays: Mapping[str, ArrayRecord] | None = None) -> Any:
    """A head and blocks as records; `arrays` are those already made for another receiver."""
    made = {BLOCK + n: (arrays or {}).get(n) or record_of(b) for n, b in blocks.items()}
    return RecordDict({HEAD: ConfigRecord({"json": json.dumps({**head, "blocks": head_of(blocks)})}), **made})


def unpack(content: RecordDict) -> tuple[dict[str, Any], dict[str, Block]]:
    """What `pack` made; anything else is unreadable."""
    try:
        head = json.loads(str(content.config_records[HEAD]["json"]))
        given = {k.removeprefix(BLOCK): r for k, r in content.array_records.items()}
        if set(given) != set(head["blocks"]):
            raise ValueError("its head and its arrays name different blocks")
        return head, {n: block_of(n, told, given[n]) for n, told in head["blocks"].items()}
    except BROKEN as error:
        raise Unreadable(f"the message cannot be read ({type(error).__name__}: {error})") from None


def block_of(name: str, told: list[Any], record: ArrayRecord) -> Block:
    kind, labels, version = told
    if kind not in KINDS or not all(type(y) is int for y in labels):
        raise ValueError(f"block {name} is of no known kind or its labels are no class ids")
    # `copy`: an array read from bytes cannot be written to, and torch wants to own its memory
    tensors = {k: torch.from_numpy(a.numpy().copy()) for k, a in record.items()}
    return Block(kind, tensors, tuple(labels), int(version))


def ask_records(ask: Ask, arrays: Mapping[str, ArrayRecord] | None = None) -> RecordDict:
    head = {"client": ask.client, "when": vars(ask.when), "names": dict(ask.names), "ticket": ask.ticket}
    head |= {"next": ask.next, "seen": list(ask.seen), "facts": dict(ask.facts)}
    return pack(head, ask.blocks, arrays)


def read_ask(content: RecordDict) -> Ask:
    head, blocks = unpack(content)
    try:
        client, ticket, after = (int(head[k]) for k in ("client", "ticket", "next"))  # they name files
        names, facts = ({str(k): str(v) for k, v in head[what].items()} for what in ("names", "facts"))
        return Ask(client, When(**head["when"]), names, blocks, ticket, after, tuple(map(int, head["seen"])), facts)
    except BROKEN as error:
        raise Unreadable(f"the message is no ask ({type(error).__name__}: {error})") from None


def answer_records(answer: Answer) -> RecordDict:
    r = answer.reply
    head = {"client": r.client, "samples": r.samples, "notes": dict(r.notes), "when": vars(answer.when)}
    return pack(head | {"kept": answer.kept, "trouble": answer.trouble, "kind": answer.kind}, r.blocks)


def read_answer(content: RecordDict) -> Answer:
    head, blocks = unpack(content)
    try:
        notes = {str(k): float(v) for k, v in head["notes"].items()}
        reply = Reply(int(head["client"]), int(head["samples"]), blocks, notes=notes)
        return Answer(reply, When(**head["when"]), bool(head["kept"]), str(head["trouble"]), str(head["kind"]))
    except BROKEN as error:
        raise Unreadable(f"the message is no answer ({type(error).__name__}: {error})") from None


def wire_bytes(messages: Iterable[Message]) -> int:
    """What Flower makes of messages before HTTP and TLS: all objects that a message consists of, each counted once."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return sum(len(o.deflate()) for m in messages for o in get_all_nested_objects(m).values())


def payload_bytes(blocks: Inbox) -> int:
    """What the ledger counts of them."""
    return sum(b.bytes + b.header_bytes for b in blocks.values())
