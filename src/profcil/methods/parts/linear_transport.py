"""Transport of PRO's memory by one linear map: the sums that clients send, and what the server does with them.

The map is that of PRO-LIN: a ridge regression of the change δ = h(x) − h_s(x) on [h_s(x); 1], over all current examples
of the clients that report. Sums of clients are added, so it is the regression on their pooled examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.memory import covariance, linear
from profcil.memory.bank import Bank
from profcil.methods.parts.memory_blocks import bank_of, block_of
from profcil.methods.parts.shared_covariance import block_of_covariance, covariance_of

LinearMap = tuple[Tensor, Tensor]  # B [d + 1, d] and the second moment of its residual [d, d]


def drift_block(before: Tensor, after: Tensor, as_sums: bool = False) -> Block:
    """The sums of one client: a factor of the second-moment matrix of [h_s(x); 1; δ], or the matrix itself, where it is
    to be added to those of others before the server sees it."""
    rows = linear.drift_rows(before, after)
    if as_sums:
        return Block("transport", {"gram": linear.packed_gram(rows)})
    return Block("transport", {"factor": linear.packed_factor(rows)})


def fit_reports(reports: Sequence[Block], width: int, ridge: float) -> LinearMap:
    """The map from the sums of some clients. `width` is the number of features."""
    columns = 2 * width + 1
    grams = (linear.sent_gram(block.tensors, columns) for block in reports)
    total = next(grams)
    for gram in grams:
        total += gram
    return linear.fit_drift(linear.split_drift(total, width), ridge)


def fit_examples(before: Tensor, after: Tensor, ridge: float) -> LinearMap:
    """The map from the features of one client's examples."""
    rows = linear.drift_rows(before, after)
    drift = linear.split_drift(rows.T @ rows, before.shape[1])
    return linear.fit_drift(drift, ridge)


def carried_bank(bank: Bank, shift: Tensor) -> Bank:
    """The bank with its means moved by the map. Spreads and counts stay."""
    move = linear.carried_means(bank.mean, shift) - bank.mean.double()
    return bank.shifted(move.float())


def carry(state: ServerState, found: LinearMap) -> ServerState:
    """The state with all means moved by the map, and the shared covariance too, if there is one."""
    shift, residual = found
    memory = bank_of(state.blocks["memory"])
    state = state.put(memory=block_of(carried_bank(memory, shift)))
    if "covariance" not in state.blocks:
        return state
    shared = covariance_of(state.blocks["covariance"])
    moved = covariance.carried(shared, shift, residual)
    return state.put(covariance=block_of_covariance(moved))
