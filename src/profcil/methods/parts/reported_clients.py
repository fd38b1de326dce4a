"""Which clients have reported in a position, as a block: each of them reports once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from profcil.engine.channel import Block, Inbox, Reply, ServerState

NAME = "reported_clients"


def reported_clients(state: ServerState) -> list[int]:
    """The clients whose reports the server has, ascending."""
    block = state.get(NAME)
    clients: list[int] = block.tensors["clients"].tolist() if block else []
    return clients


def has_reported(client: int, inbox: Inbox) -> bool:
    """Whether the server has the report of a client already."""
    block = inbox.get(NAME)
    return block is not None and client in block.tensors["clients"]


def put_reported(state: ServerState, reports: Sequence[Reply], device: torch.device) -> ServerState:
    """The state with the clients of these reports added."""
    fresh = [client for reply in reports for client in reply.clients]
    ids = sorted(fresh + reported_clients(state))
    clients = torch.tensor(ids, dtype=torch.int32, device=device)
    return state.put(**{NAME: Block("memory", {"clients": clients})})
