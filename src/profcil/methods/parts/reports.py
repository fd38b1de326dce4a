"""Reports of clients that the server of PRO stores until a position ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState

PENDING = "pending/"  # prefix of the names of stored reports; the client's id and the block's name follow
BEFORE = "_before_reports"  # ending of the name of a memory block as it was before the first report


def store(state: ServerState, client: int, blocks: Mapping[str, Block]) -> ServerState:
    """The state with the report of one client."""
    named = {f"{PENDING}{client}/{name}": block for name, block in blocks.items()}
    return state.put(**named)


def stored(state: ServerState) -> list[Reply]:
    """All stored reports, in the order in which they were sent; each block is a reply of its own."""
    replies = []
    for stored_name, block in state.blocks.items():
        if stored_name.startswith(PENDING):
            _, name = stored_name.rsplit("/", 1)
            replies.append(Reply(0, 0, {name: block}))
    return replies


def without_reports(state: ServerState) -> ServerState:
    """The state without reports and what belongs to them."""
    temporary = ["reported_clients"]
    for name in state.blocks:
        if name.startswith(PENDING) or name.endswith(BEFORE):
            temporary.append(name)
    return state.drop(*temporary)


def gather(state: ServerState, replies: Sequence[Reply], memory: Sequence[str]) -> ServerState:
    """The state with further reports, and with the memory as it was before the first one."""
    if "reported_clients" in state.blocks:
        state = state.also(**{name: name + BEFORE for name in memory})
    else:
        state = state.also(**{name + BEFORE: name for name in memory})
    clients = list(reporters(state))
    for reply in replies:
        state = store(state, reply.client, reply.blocks)
        clients.append(reply.client)
    tensor = next(iter(state.blocks["base"].tensors.values()))
    ids = torch.tensor(sorted(clients), dtype=torch.int32, device=tensor.device)
    return state.put(reported_clients=Block("memory", {"clients": ids}))


def reporters(blocks: ServerState | Inbox) -> list[int]:
    """The clients that have reported."""
    block = blocks.get("reported_clients")
    return block.tensors["clients"].tolist() if block else []


def has_reported(client: Client, inbox: Inbox) -> bool:
    """Whether the server has a report of this client for this position."""
    return client.id in reporters(inbox)
