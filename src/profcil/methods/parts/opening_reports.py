"""Opening reports of PRO-LIN as blocks of their own, apart from the memory until the position closes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profcil.engine.channel import Reply, ServerState
from profcil.memory.linear import Summary
from profcil.methods.parts.reported_clients import reported_clients
from profcil.methods.parts.summaries import summary_of_report

OPENING = "opening/"  # prefix of the blocks of an opening report; the ids of its clients follow


def store_opening(state: ServerState, reports: Sequence[Reply]) -> ServerState:
    """The state with opening reports, apart from the memory."""
    for r in reports:
        clients = ",".join(map(str, r.clients))
        stored = {f"{OPENING}{clients}/{name}": block for name, block in r.blocks.items()}
        state = state.put(**stored)
    return state


def merged_openings(state: ServerState) -> set[int]:
    """The clients whose opening reports join the memory, since they have sent no closing report."""
    names = {name.split("/")[1] for name in state.blocks if name.startswith(OPENING)}
    return {int(client) for clients in names for client in clients.split(",")} - set(reported_clients(state))


def unreported(state: ServerState, replaced: Sequence[int]) -> Iterator[Summary]:
    """The opening reports of clients that have sent no closing report, one at a time: their matrices are large."""
    names = [name for name in state.blocks if name.startswith(OPENING) and name.endswith("/class_means")]
    for name in names:
        clients = {int(client) for client in name.split("/")[1].split(",")}
        if not clients & set(replaced):
            yield summary_of_report(state.blocks, name.removesuffix("class_means"))
