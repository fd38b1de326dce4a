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


def put_answered(state: ServerState, replies: Sequence[Reply]) -> ServerState:
    """The state with the clients that sent a report now. They are not asked again, even if noise has left no class of
    their report: it has been paid for."""
    sent = [reply for reply in replies if "class_means" in reply.blocks]
    if not sent:
        return state
    fresh = [client for reply in sent for client in reply.clients]
    ids = sorted(fresh + reported_clients(state))
    device = sent[0].blocks["class_means"].tensors["count"].device
    clients = torch.tensor(ids, dtype=torch.int32, device=device)
    return state.put(**{NAME: Block("memory", {"clients": clients})})
