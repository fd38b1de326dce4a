"""A position that opens with a closed-form head, against which clients of PRO fit the base (`fit_head = "closed"`)."""

from __future__ import annotations

import torch
from torch import Tensor

from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox
from profcil.engine.phases import Shuffled
from profcil.memory.bank import measure
from profcil.memory.covariance import packed_scatter
from profcil.methods.parts.memory_blocks import block_of_moments, with_tensor


def new_class_report(client: Client, inbox: Inbox) -> dict[str, Block]:
    """Moments and scatter of the current classes that the server does not know; nothing if it knows all."""
    rows = ~client.allowed(inbox["known_classes"].labels)[client.y]
    if not bool(rows.any()):
        return {}
    features = client.features(inbox["base"])[rows]
    y = client.y[rows]
    moments = measure(features, y)
    rank = torch.searchsorted(client.tensor(moments.labels), y)
    scatter = packed_scatter(features, rank, moments.mean)
    return {"memory_moments": with_tensor(block_of_moments(moments), scatter=scatter)}


def rows_in_head(client: Client, inbox: Inbox) -> Tensor:
    """The current examples whose class the head has. It lacks classes of clients that did not open the position."""
    known = set(inbox["starting_head"].labels) if "starting_head" in inbox else set()
    return client.tensor([row for row, label in enumerate(client.y_list) if label in known])


def examples_in_head(client: Client, inbox: Inbox) -> tuple[Shuffled, Tensor]:
    """These examples as a batch source, and the mask of their classes."""
    rows = rows_in_head(client, inbox)
    labels = tuple(label for label in client.labels if label in inbox["starting_head"].labels)
    return Shuffled(client.current[rows], client.y[rows]), client.allowed(labels)
