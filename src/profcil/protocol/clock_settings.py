"""The settings of clocks: how long clients take, and for whom the server waits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from profcil.config import Checked, setting
from profcil.errors import ConfigError


@dataclass(frozen=True)
class ClockSettings(Checked):
    """Clocks: how long clients take in a simulation, and for whom the server waits. A deployment has real times, and of
    the modes only buffer. Runs without clocks do not store this section."""

    mode: str = setting(
        "off",
        "off: no clocks; wait: simulated time is counted, a round lasts as long as its slowest participant; buffer: "
        "the server goes on as soon as some replies have arrived, and late ones join later",
        choices=("off", "wait", "buffer"),
    )
    latency: float = setting(1.0, "simulated seconds that messages take, there and back", low=0.0)
    example_seconds: float = setting(0.01, "simulated seconds for one example in one epoch", low=0.0)
    spread: float = setting(
        0.0, "how speeds differ between clients: the standard deviation of their logarithm", low=0.0, high=5.0
    )
    stragglers: float = setting(0.0, "share of the clients that are stragglers", low=0.0, high=1.0)
    slowdown: float = setting(5.0, "how many times as long stragglers take", low=1.0)
    dropout: float = setting(
        0.0, "probability that a reply never arrives; with mode = wait it is asked for again", low=0.0, high=0.95
    )
    available: float = setting(1.0, "share of a day in which a client can start a turn", low=0.01, high=1.0)
    day: float = setting(86400.0, "simulated seconds of a day; each client's begins at a time of its own", low=1e-3)
    buffer: int = setting(
        0, "replies per update of the server; 0 = half the participants of a synchronous round, rounded up", low=0
    )
    staleness: float = setting(
        0.5,
        "a: the update of a reply counts (1 + τ)^-a, where τ is the number of updates since its turn began",
        low=0.0,
    )
    max_staleness: int = setting(
        0, "replies that are older than this many updates of the server are not used; 0 = all are", low=0
    )
    statistics: float = setting(
        0.5,
        "share of the idle clients whose statistics the server waits for; the others' join later",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if self.mode == "off" and changed:
            raise ConfigError(
                f"clock.{changed[0]} is set, but there are no clocks; set clock.mode = wait or buffer, or leave it out"
            )
