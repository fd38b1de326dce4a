"""A bound on model updates that follows a quantile of their lengths (Andrew et al., 2021).

Each client says with its update, and with noise, whether the update was within the bound. With b the share of a round's
clients for which it was, the server sets C ← C·exp(−η(b − γ)) for the quantile γ, and sends C with the next round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from profcil.engine.channel import Block, Reply, ServerState
from profcil.metrics.ledger import HEADER
from profcil.privacy.settings import PrivacySettings

NAME = "update_bound"  # of the block with the bound
NOTE = "within_bound"  # of a reply: ½ or −½, with noise
MOST = 0.5  # by which a client can change a sum of these
SHARE = 0.1  # of the budget of a reply, relative to its other parts
RATE = 0.2  # η


def bound_of(blocks: Mapping[str, Block], settings: PrivacySettings) -> float:
    """The bound that a client was sent, or the fixed one."""
    block = blocks.get(NAME)
    return float(block.tensors["bound"]) if block else settings.update_bound


def with_bound(state: ServerState, bound: float) -> ServerState:
    """The state with a bound. It is sent as part of the header."""
    return state.put(**{NAME: Block(HEADER, {"bound": torch.tensor(bound, dtype=torch.float64)})})


def next_bound(bound: float, replies: Sequence[Reply], quantile: float) -> float:
    """The bound of the next round. A share that noise has moved beyond 0 or 1 counts as these."""
    said = [reply for reply in replies if NOTE in reply.notes]
    if not said:
        return bound
    clients = sum(len(reply.clients) for reply in said)
    within = sum(float(reply.notes[NOTE]) for reply in said) / clients + MOST
    return bound * math.exp(-RATE * (min(1.0, max(0.0, within)) - quantile))
