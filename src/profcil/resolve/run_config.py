"""The complete configuration of a run, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from profcil.config import (
    OWN,
    ChannelSettings,
    Checked,
    ModelSettings,
    OwnSettings,
    RobustSettings,
    TrainSettings,
    WarmupSettings,
)
from profcil.config import setting as field
from profcil.privacy.settings import PrivacySettings
from profcil.protocol.clock_settings import ClockSettings
from profcil.protocol.settings import StreamSettings

SETTINGS = {
    "homogeneous": {"support": 1.0, "coverage": 1.0, "disorder": 0.0},
    "severe": {"support": 0.4, "coverage": 0.5, "disorder": 0.6},
}
REGIMES = ("matched", "expanded")
LIST_HINT = " (`profcil list settings` shows all)"  # added to a message about an unknown key
SECTIONS = {
    "stream": StreamSettings,
    "train": TrainSettings,
    "warmup": WarmupSettings,
    "model": ModelSettings,
    "privacy": PrivacySettings,
    "robust": RobustSettings,
    "channel": ChannelSettings,
    "clock": ClockSettings,
    OWN: OwnSettings,
}


@dataclass(frozen=True)
class RunConfig(Checked):
    """Everything that determines a run."""

    stream: StreamSettings
    train: TrainSettings
    warmup: WarmupSettings
    model: ModelSettings
    params: Any  # the settings of the method
    dataset: str = field("digits", "dataset to learn")
    method: str = field("promax", "method to learn it with")
    setting: str = field("severe", "heterogeneity of the stream", choices=tuple(SETTINGS))
    seed: int = field(0, "seed of all random numbers", low=0)
    device: str = field("cpu", "torch device")
    threads: int = field(0, "torch threads of a step; 0 = all cores for large images, else one", low=0)
    workers: int = field(0, "clients trained in parallel on a CPU; 0 = by cores; does not change the result", low=0)
    accelerate: str = field(
        "auto",
        "auto: the fastest way on this machine; off: plain PyTorch, one client and one step after another",
        choices=("auto", "off"),
    )
    transfer: str = field("changed", "what is sent: blocks the receiver lacks, or all", choices=("changed", "full"))
    regime: str = field("matched", "budget of methods for replay and summaries of old classes", choices=REGIMES)
    evaluate: str = field("test", "part of the dataset that is scored", choices=("test", "validation"))
    keep_memories: bool = field(False, "store remembered and true class means of every position, for snapshots")
    keep_states: int = field(0, "states at the ends of positions that are kept for `profcil rollback`", low=0)
    robust: RobustSettings = dataclasses.field(default_factory=RobustSettings)
    own: OwnSettings = dataclasses.field(default_factory=OwnSettings)
    privacy: PrivacySettings = dataclasses.field(default_factory=PrivacySettings)
    channel: ChannelSettings = dataclasses.field(default_factory=ChannelSettings)
    clock: ClockSettings = dataclasses.field(default_factory=ClockSettings)

    @property
    def path(self) -> str:
        """`accelerate`, but "off" where the gradient of each example is needed, which the fast path does not have."""
        return "off" if self.privacy.gradient_bound else self.accelerate


TOP_LEVEL = {f.name for f in dataclasses.fields(RunConfig)} - {*SECTIONS, "params"}
