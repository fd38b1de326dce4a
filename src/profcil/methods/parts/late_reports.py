"""Late closing reports of PRO-LIN: which examples the memory has already.

A client sends an opening report and a closing report of the same examples. If the closing report is late, the opening
one joins the memory in its place. The server stores for which clients this was done.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from profcil.engine.channel import Block, ServerState, When
from profcil.engine.late import MARKER, LateStatistics

NAME = "merged_openings"


def note_merged(state: ServerState, clients: Collection[int], when: When) -> ServerState:
    """The state with a note that the opening reports of these clients have joined the memory. Without late statistics
    there is no note."""
    if MARKER not in state.blocks or not clients:
        return state
    pairs = [[when.position, client] for client in sorted(clients)]
    known = state.get(NAME)
    if known is not None:
        pairs = known.tensors["pairs"].tolist() + pairs
    device = state.blocks["bank"].tensors["mean"].device
    return state.put(**{NAME: Block("memory", {"pairs": torch.tensor(pairs, dtype=torch.int32, device=device)})})


def is_merged(state: ServerState, late: LateStatistics) -> bool:
    """Whether the memory has the opening report of the client and the position of this report."""
    known = state.get(NAME)
    return known is not None and [late.when.position, late.reply.client] in known.tensors["pairs"].tolist()
