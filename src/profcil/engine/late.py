"""Statistics that arrive late, as methods receive them, and the moves that the memory has made since.

A method that moves its memory when the base moves (transport, a linear map) records each move. It costs nothing unless
a run expects late statistics (`clock.mode = "buffer"`). Statistics that were measured under an older base go through
the same moves before they join the memory. Moves that no statistics need any more are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from profcil.engine.channel import Block, Reply, ServerState, When
from profcil.errors import ConfigError

if TYPE_CHECKING:
    from profcil.resolve import RunConfig

MARKER = "late_statistics"  # an empty block: this run expects late statistics
MOVE = "move/"  # prefix of the blocks of moves; the version of the base that a move leads to follows


@dataclass(frozen=True)
class LateStatistics:
    """The statistics of one client, which may arrive long after they were measured."""

    reply: Reply
    when: When  # the round in which the method asked for them
    version: int  # of the base under which they were measured
    opening: bool = False  # asked for before the first turns of the position


def expect_late(state: ServerState) -> ServerState:
    """The state, from now on with a record of moves."""
    return state if MARKER in state.blocks else state.put(**{MARKER: Block("memory", {})})


def record_move(state: ServerState, tensors: Mapping[str, Tensor], labels: tuple[int, ...] = ()) -> ServerState:
    """The state with a move of the memory to the present base, if late statistics are expected."""
    if MARKER not in state.blocks:
        return state
    name = f"{MOVE}{state.blocks['base'].version}"
    return state.put(**{name: Block("memory", dict(tensors), labels)})


def recorded_moves(state: ServerState) -> dict[int, Block]:
    """The recorded moves by the version of the base that they lead to, in this order."""
    found = {int(name.removeprefix(MOVE)): block for name, block in state.blocks.items() if name.startswith(MOVE)}
    return dict(sorted(found.items()))


def moves_since(state: ServerState, version: int) -> list[Block]:
    """The moves that statistics measured under this version of the base have missed."""
    return [block for target, block in recorded_moves(state).items() if target > version]


def forget_moves(state: ServerState, oldest: int | None) -> ServerState:
    """The state without moves that no statistics need: those measured under the oldest version still come; None = no
    statistics are on their way."""
    moves = recorded_moves(state)
    return state.drop(*(f"{MOVE}{target}" for target in moves if oldest is None or target <= oldest))


def check_clock(config: RunConfig, method: Any) -> None:
    """Refuses what cannot be combined with replies that arrive late."""
    if config.clock.mode != "buffer":
        return
    if misfit := method.late_misfit():
        raise ConfigError(f"{misfit}; choose another method, or clock.mode = wait (in a deployment: off)")
    refused = (
        (config.privacy.unit != "none", "privacy.unit counts the replies of synchronous rounds"),
        (config.privacy.secure_sum, "privacy.secure_sum needs the replies of all clients of a round at once"),
        (config.robust.aggregation != "mean", "robust.aggregation compares replies to one and the same model"),
        (config.train.early_stop > 0, "train.early_stop leaves out rounds, which the clocks have planned"),
    )
    for applies, reason in refused:
        if applies:
            raise ConfigError(f"{reason}, so it cannot be combined with clock.mode = buffer; leave out one of them")
