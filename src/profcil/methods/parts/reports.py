"""PRO without global refresh: the server stores statistics under the clients' own models until the position ends."""

from __future__ import annotations

from collections.abc import Sequence

from profcil.engine.channel import Reply, ServerState

PENDING = "pending/"  # prefix of the names of stored reports; the client's id and the block's name follow


def store(state: ServerState, replies: Sequence[Reply]) -> ServerState:
    """The state with the moments in these replies."""
    for reply in replies:
        moments = {name: block for name, block in reply.blocks.items() if name.endswith("_moments")}
        named = {f"{PENDING}{reply.client}/{name}": block for name, block in moments.items()}
        state = state.put(**named)
    return state


def stored(state: ServerState) -> list[Reply]:
    """All stored reports, in the order in which they were sent; each block is a reply of its own."""
    replies = []
    for stored_name, block in state.blocks.items():
        if stored_name.startswith(PENDING):
            _, name = stored_name.rsplit("/", 1)
            replies.append(Reply(0, 0, {name: block}))
    return replies


def without_reports(state: ServerState) -> ServerState:
    """The state without stored reports."""
    pending = [name for name in state.blocks if name.startswith(PENDING)]
    return state.drop(*pending)
