"""The starting model of a position: the global model that the first round of the position was broadcast with.

It is the teacher for the whole position. In the first round it is the broadcast model itself. After that round the
server stores it under further block names, for clients that participate in later rounds only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from profcil.engine.channel import Inbox, ServerState
from profcil.engine.client import Client
from profcil.model.net import Net, Weights

START = "start/"  # prefix of the names of the starting model's blocks


def start_names(blocks: Sequence[str]) -> tuple[str, ...]:
    """The names under which the starting model's blocks are stored."""
    return tuple(START + block for block in blocks)


def attach_start(net: Net, blocks: Sequence[str]) -> None:
    """Adds a second copy of these blocks to the model, for losses that compare with the starting model."""
    for block in blocks:
        module = net.get_submodule(block)
        net.attach(START + block, copy.deepcopy(module))


def store_start(state: ServerState, blocks: Sequence[str]) -> ServerState:
    """The state in which the present model is stored as the starting model."""
    return state.also(**{START + block: block for block in blocks})


def start_weights(inbox: Inbox, blocks: Sequence[str]) -> Weights:
    """The starting model: in a position's first round the broadcast model."""
    weights = {}
    for block in blocks:
        start = inbox.get(START + block, inbox[block])
        weights[block] = dict(start.tensors)
    return weights


def count_memory(client: Client, weights: Weights) -> None:
    """Counts these weights as extra memory of the client."""
    for tensors in weights.values():
        for tensor in tensors.values():
            client.keep(tensor)
