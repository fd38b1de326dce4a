"""Transport of PRO's memory by one linear map: the sums that clients send, and what the server does with them.

The map is that of PRO-LIN: a ridge regression of the change δ = h(x) − h_s(x) on [h_s(x); 1], over all current examples
of the clients that report. Sums of clients are added, so it is the regression on their pooled examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from profcil.engine.channel import Block, Inbox, ServerState
from profcil.engine.client import Client
from profcil.engine.late import record_move
from profcil.memory import covariance, linear_drift, symmetric
from profcil.memory.bank import Bank
from profcil.methods.parts.memory_blocks import bank_of, block_of
from profcil.methods.parts.shared_covariance import block_of_covariance, covariance_of

LinearMap = tuple[Tensor, Tensor]  # B [d + 1, d] and the second moment of its residual [d, d]


def drift_block(before: Tensor, after: Tensor, as_sums: bool = False) -> Block:
    """The sums of one client: a factor of the second-moment matrix of [h_s(x); 1; δ], or the matrix itself, where it is
    to be added to those of others before the server sees it."""
    rows = linear_drift.drift_rows(before, after)
    if as_sums:
        return Block("transport", {"gram": symmetric.packed_gram(rows)})
    return Block("transport", {"factor": symmetric.packed_factor(rows)})


def fit_reports(reports: Sequence[Block], width: int, ridge: float) -> LinearMap:
    """The map from the sums of some clients. `width` is the number of features."""
    columns = 2 * width + 1
    grams = (symmetric.sent_gram(block.tensors, columns) for block in reports)
    total = next(grams)
    for gram in grams:
        total += gram
    return linear_drift.fit_drift(linear_drift.split_drift(total, width), ridge)


def fit_examples(before: Tensor, after: Tensor, ridge: float) -> LinearMap:
    """The map from the features of one client's examples."""
    rows = linear_drift.drift_rows(before, after)
    drift = linear_drift.split_drift(rows.T @ rows, before.shape[1])
    return linear_drift.fit_drift(drift, ridge)


def carried_bank(bank: Bank, shift: Tensor) -> Bank:
    """The bank with its means moved by the map. Spreads and counts stay."""
    move = linear_drift.carried_means(bank.mean, shift) - bank.mean.double()
    return bank.shifted(move.float())


def aligned_linearly(
    client: Client, inbox: Inbox, features: Tensor, banks: Mapping[str, Bank], ridge: float, counted: bool
) -> dict[str, Bank]:
    """The banks moved by a linear map of the client's own drift since the start of the position. The starting base is
    sent in plastic rounds only; afterwards the memory has been carried. `counted` says that its bytes have been added
    to the client's extra memory."""
    start = inbox.get("starting_base")
    if start is None:
        return dict(banks)
    before = client.keep(client.features(start))
    if not counted:
        client.extra_bytes += start.bytes
    shift, _ = fit_examples(before, features, ridge)
    return {name: carried_bank(bank, shift) for name, bank in banks.items()}


def base_has_moved(state: ServerState) -> bool:
    """Whether the base is another than the stored starting base of the position."""
    start = state.get("starting_base")
    return start is not None and start.version != state.blocks["base"].version


def carry_memory(state: ServerState, reports: Sequence[Block], ridge: float) -> ServerState:
    """The state with the memory carried to the present base by the clients' sums. It records the map."""
    width = state.blocks["memory"].tensors["mean"].shape[1]
    found = fit_reports(reports, width, ridge)
    state = record_move(state, {"map": found[0]})
    return carry(state, found).drop("starting_base")


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
