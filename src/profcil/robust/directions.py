"""Finds model updates that point against those of the other clients, e.g. updates with their sign flipped.

Updates of honest clients point in similar directions, even where the clients have different classes. There are streams
in which they do not, e.g. with a softmax over two classes of which a client has one. Then many clients have such
updates, and it says nothing about one of them. So these updates are left out only while few clients have had one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox, Reply
from profcil.robust.rules import FEWEST, TRIMMED

OPPOSED = -0.3  # cosines with other updates are below it
COMPARED_AT_ONCE = 1 << 24  # numbers of all updates together


def opposed(replies: Sequence[Reply], inboxes: Mapping[int, Inbox]) -> list[int]:
    """The clients whose model update points against the others of the round: all of them, or four fifths if they are
    many, for malicious clients may agree with each other. There must be two others."""
    senders = [reply for reply in replies if reply.weights()]
    gram = products(senders, inboxes)
    moved = gram.diagonal().nonzero().flatten()
    if len(moved) < FEWEST:
        return []
    alike = cosines(gram[moved][:, moved]).fill_diagonal_(-torch.inf).sort(1, descending=True).values
    nearest = alike[:, int(TRIMMED * (len(moved) - 1))]
    return [senders[i].client for i in moved[nearest < OPPOSED].tolist()]


def are_few(clients: int, of: int) -> bool:
    """Whether so many clients may be malicious: at most a fifth, or one."""
    return clients <= max(1, int(TRIMMED * of))


def without_update(reply: Reply, inbox: Inbox) -> Reply:
    """The reply with each model block as it was broadcast."""
    blocks = {
        name: unchanged(block, inbox[name]) for name, block in reply.blocks.items() if is_update(block, name, inbox)
    }
    return replace(reply, blocks={**reply.blocks, **blocks})


def unchanged(block: Block, broadcast: Block) -> Block:
    return replace(block, tensors={**block.tensors, **broadcast.tensors})


def is_update(block: Block, name: str, inbox: Inbox) -> bool:
    return block.kind == "model" and name in inbox


def products(replies: Sequence[Reply], inboxes: Mapping[int, Inbox]) -> Tensor:
    """The inner products of all updates, [n, n] in float64. A block that a client did not change is an update of 0."""
    total = torch.zeros(len(replies), len(replies), dtype=torch.float64)
    shapes = {
        (n, k): t for r in replies for n, b in r.blocks.items() if b.kind == "model" for k, t in b.tensors.items()
    }
    width = max(1, COMPARED_AT_ONCE // max(1, len(replies)))
    for (name, key), tensor in shapes.items():
        if not tensor.is_floating_point():
            continue
        updates = [flat_update(reply, inboxes[reply.client], name, key, tensor) for reply in replies]
        for start in range(0, tensor.numel(), width):
            part = torch.stack([update[start : start + width].double() for update in updates])
            total += (part @ part.T).cpu()
    return total


def flat_update(reply: Reply, inbox: Inbox, name: str, key: str, like: Tensor) -> Tensor:
    """One tensor of an update, flat."""
    if name not in reply.blocks or name not in inbox:
        return torch.zeros_like(like).flatten()
    return (reply.blocks[name].tensors[key] - inbox[name].tensors[key]).flatten()


def cosines(gram: Tensor) -> Tensor:
    """Cosines from inner products."""
    lengths = gram.diagonal().sqrt()
    return gram / lengths / lengths[:, None]
