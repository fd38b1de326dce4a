"""Constants of a loss that keeps the scores of remembered classes as they were at the start of a position."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from profcil.engine.client import Client
from profcil.engine.payload import Inbox


def score_constants(client: Client, inbox: Inbox) -> dict[str, Tensor]:
    """Constants of `score_keeping_loss`: the position's starting head, a mask of the remembered classes without current
    data, and a weight, which is 0 if there are none."""
    head = inbox["starting_head"]
    adapter = inbox["starting_adapter"].tensors if "starting_adapter" in inbox else {}
    remembered = head.labels
    if not remembered and "memory" in inbox:
        remembered = inbox["memory"].labels
    old = tuple(y for y in remembered if y not in client.labels)
    constants = {f"starting_{name}": tensor for name, tensor in adapter.items()}
    for name, rows in head.tensors.items():
        constants[f"starting_{name}"] = dense(rows, head.labels, client)
    weight = 1.0 if old else 0.0
    constants["remembered"] = client.allowed(old or client.labels)
    constants["remembered_weight"] = head.tensors["weight"].new_full((), weight)
    return constants


def dense(rows: Tensor, labels: Sequence[int], client: Client) -> Tensor:
    """Rows for all class ids; those without a label are zero. Without labels the rows are complete already."""
    if not labels:
        return rows
    ids = client.tensor(labels)
    zeros = rows.new_zeros(client.net.classes, *rows.shape[1:])
    return zeros.index_copy(0, ids, rows)
