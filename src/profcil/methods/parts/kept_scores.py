"""An option of PRO beyond the paper: the scores of remembered classes stay as they were at the start of a position.

While the base moves, a distillation loss (Li and Hoiem, 2016) is added. The position's starting head scores features of
its starting base and of the moving base; the loss is the cross-entropy between the two. Both bases see the same views
in the same mode. A target of the round's broadcast model would move along with the base from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, ServerState
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Train
from profcil.model.losses import soft_cross_entropy
from profcil.model.net import Net, Tail

STARTING = ("starting_base", "starting_adapter", "starting_head")  # copies of a position's first model


def with_start(state: ServerState, solved: Block | None) -> ServerState:
    """The state with copies of the base and the head that the next position starts from. `solved` is the closed head
    where that predicts; without any remembered class it has no scores to keep."""
    if solved is None:
        return state.also(starting_base="base", starting_adapter="adapter", starting_head="head")
    if not solved.labels:
        return state
    rows = {name: tensor.float() for name, tensor in solved.tensors.items()}
    head = Block("memory", rows, solved.labels)
    return state.put(starting_head=head).also(starting_base="base")


def extended(phase: Train, loss: Callable[[Any, Batch], Tensor], client: Client, inbox: Inbox) -> Train:
    """The phase with another loss, and with what it needs: the starting base as one more block, which does not move,
    and the starting head."""
    start = inbox["starting_base"].tensors
    base = {name: client.keep(tensor) for name, tensor in start.items()}
    weights = {**phase.weights, "starting_base": base}
    constants = {**phase.constants, **score_constants(client, inbox)}
    return replace(phase, loss=loss, weights=weights, constants=constants)


def score_constants(client: Client, inbox: Inbox) -> dict[str, Tensor]:
    """The position's starting head, a mask of the remembered classes without current data, and a weight, which is 0 if
    there are none."""
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


def loss(net: Net, batch: Batch, weak: Inputs, u: Tensor, temperature: float) -> Tensor:
    """The cross-entropy between the starting head's scores of the weak view under both bases. `u` are the features of
    that view under the moving base."""
    with torch.no_grad():
        before = net.starting_base(*weak)  # type: ignore[operator]
    scores = starting_scores(net, batch, u, temperature)
    target = starting_scores(net, batch, before, temperature)
    return soft_cross_entropy(scores, target, batch["remembered"])


def starting_scores(net: Net, batch: Batch, u: Tensor, temperature: float) -> Tensor:
    """Scores of the position's starting head, divided by the temperature: of the closed head where it predicts, else of
    adapter and head. In float32, because scores of a closed head are small differences of large numbers."""
    with torch.autocast(u.device.type, enabled=False):
        u = u.float()
        if "starting_bias" in batch:
            scores = F.linear(u, batch["starting_weight"], batch["starting_bias"])
        else:
            adapter = {k: batch[f"starting_{k}"] for k in net.adapter}
            head = {"weight": batch["starting_weight"]}
            scores = Tail(adapter, head, net.cosine).classify(u)
        return scores / temperature
