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
    remembered = head.labels or (inbox["memory"].labels if "memory" in inbox else ())
    old = tuple(y for y in remembered if y not in client.labels)
    return {
        **{f"starting_{k}": t for k, t in adapter.items()},
        **{f"starting_{k}": dense(t, head.labels, client) for k, t in head.tensors.items()},
        "remembered": client.allowed(old or client.labels),
        "remembered_weight": head.tensors["weight"].new_full((), float(bool(old))),
    }


def dense(rows: Tensor, labels: Sequence[int], client: Client) -> Tensor:
    """Rows for all class ids; those without a label are zero. Without labels the rows are complete already."""
    if not labels:
        return rows
    return rows.new_zeros(client.net.classes, *rows.shape[1:]).index_copy(0, client.tensor(labels), rows)
