"""What a run needs between two rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from profcil.engine.changed_rows import RowHistory
from profcil.engine.channel import ServerState, When
from profcil.engine.client import FeatureKey
from profcil.engine.client_store import ClientStore
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.privacy.adaptive_bound import NAME as UPDATE_BOUND
from profcil.privacy.adaptive_bound import NOTE as WITHIN_BOUND

if TYPE_CHECKING:
    from profcil.engine.arrivals import Arrivals

LISTS = {"skipped", "dropped", "quarantined", "opposed"}
NOT_SUMMED = {"clients", "loss", "simulated_time", UPDATE_BOUND, WITHIN_BOUND} | LISTS  # facts of a round


@dataclass
class RunState:
    """Everything that a run needs between two rounds. Anything else is lost when a run is saved and resumed, and so is
    `evaluated`, which is computed again."""

    server: ServerState
    scores: Scores
    ledger: Ledger
    held: dict[int, dict[str, int]] = field(default_factory=dict)  # client → block → version it holds
    private: dict[int, dict[str, Tensor]] | ClientStore = field(default_factory=dict)
    position: int = 0
    round: int = 0  # the next round to compute
    client_bytes: int = 0  # largest extra memory that a client needed
    server_bytes: int = 0  # largest memory that the server held beyond the model
    strikes: dict[int, int] = field(default_factory=dict)  # client → rounds in which its replies were dropped
    opposed: tuple[int, ...] = ()  # clients that had an update against the others in a round
    tally: dict[str, float] = field(default_factory=dict)  # sums over rounds, e.g. replay served, server seconds
    stopping: dict[str, float] = field(default_factory=dict)  # of early stopping: best FAA, rounds since, stopped
    row_histories: dict[str, RowHistory] = field(default_factory=dict)  # of blocks, where changed rows are sent alone
    arrivals: Arrivals | None = None  # with clocks: the time, and replies on their way
    evaluated: dict[FeatureKey, Tensor] = field(default_factory=dict)  # features of the last evaluation; not saved

    def add_to_tally(self, facts: Mapping[str, Any]) -> None:
        """Adds the numbers of a round to their sums over the run."""
        for name in facts.keys() - NOT_SUMMED:
            self.tally[name] = self.tally.get(name, 0.0) + facts[name]


Watch = Callable[[str, When, dict[str, Any]], None]  # called after every round and position: progress, log, saving
