"""The server's part: the same run as everywhere, in a run folder, with its clients on Flower's grid.

If the folder holds a state already, the run goes on from there. A state is saved after every round: a round costs
seconds here, and whoever restarts a server wants to lose none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from profcil import registry
from profcil.deploy.fleet import Flower
from profcil.deploy.mailbox import Post
from profcil.deploy.node_registry import Roster
from profcil.deploy.policy import Policy
from profcil.engine.channel import When
from profcil.engine.loop import RunState, stream, task_totals
from profcil.engine.run import Keeper, Observer, settings_of
from profcil.engine.warmup import Warmed, compute
from profcil.engine.world import World, device_of
from profcil.errors import RunFolderError
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL, Weights
from profcil.runs.folder import RunFolder
from profcil.runs.settings_check import check_settings


class Log(Keeper):
    """Keeps a deployment: also what happens between rounds, and a state after every round and position."""

    def note(self, event: Mapping[str, Any]) -> None:
        """An event between two states; it is kept with the one before."""
        line = json.dumps(dict(event)) + "\n"
        self.folder.append(line)
        state, events = self.whole
        self.whole = state, events + line

    def watch(self, what: str, when: When, facts: dict[str, Any]) -> None:
        super().watch(what, when, facts)
        if what != "warmup":
            self.save()

    def save(self) -> None:
        """What clients are told next rests on a state that is on the disk."""
        super().save()
        self.folder.settle()


@dataclass
class Notes:
    """Events go to the log; until there is one they wait."""

    log: Log | None = None
    waiting: list[Mapping[str, Any]] = field(default_factory=list)

    def __call__(self, event: Mapping[str, Any]) -> None:
        if self.log:
            self.log.note(event)
        else:
            self.waiting.append(event)

    def attach(self, log: Log) -> None:
        self.log = log
        for event in self.waiting:
            log.note(event)


def serve(
    world: World, out: Path, data_dir: Path, roster: Roster, notes: Notes, policy: Policy, observe: Observer
) -> Path:
    """Starts a run in a folder, or goes on with it."""
    config = world.config
    method = registry.find("methods", config.method).METHOD(config.params)
    told = {"run": roster.run, "plan": world.plan.digest, "data": world.bundle.fingerprint}
    with RunFolder(out) as folder:
        log = Log(world, folder, observe, data_dir)
        # a run whose clients' memories lie elsewhere must not be resumed as a simulation
        log.facts |= {"run": roster.run, "config": {**settings_of(config), "executor": "flower"}}
        world.fleet = Flower(Post(roster.grid, notes), roster, policy, told, notes)
        if folder.started:
            take_up(log, notes)
        else:
            folder.begin(config, world.plan)
            begin(log, method, notes)
        if log.state.position < world.plan.positions:
            stream(world, method, log.state, log.watch)
        return folder.path


def begin(log: Log, method: Any, notes: Notes) -> None:
    """A first state, after the warm-up."""
    world = log.world
    scores = Scores.empty(world.plan.positions, task_totals(world))
    log.hold(first(method, world.net.weights((*MODEL, *world.net.attached)), scores, Ledger()))  # for the notes
    notes.attach(log)
    log.note({"event": "started", "pid": os.getpid()})
    warmed = warm(log)
    log.facts |= {"warmup_seconds": warmed.seconds, "warmup_cached": False}
    log.hold(first(method, warmed.weights, scores, Ledger(list(warmed.ledger.entries))), log.whole[1])
    log.save()


def first(method: Any, weights: Weights, scores: Scores, ledger: Ledger) -> RunState:
    with torch.no_grad():
        return RunState(method.begin(weights), scores, ledger)


def warm(log: Log) -> Warmed:
    """Always with the clients that are there: what the cache of simulations holds is not theirs, nor the reverse."""
    world = log.world
    if not world.config.warmup.rounds:
        return Warmed(world.net.weights((*MODEL, *world.net.attached)), 0.0, False, Ledger())
    return compute(world, log.watch)


def take_up(log: Log, notes: Notes) -> None:
    """The last saved state, if it belongs to the same settings, data and plan."""
    state, events, saved = log.folder.load(device_of(log.world.config.device))
    check_settings(log.folder.path, saved["config"], log.facts["config"])
    for what in ("data", "plan"):
        if log.facts[what] != saved[what]:
            raise RunFolderError(f"{log.folder.path} began with another {what}; give the same data and settings")
    log.hold(state, events)
    log.pick_up(saved)
    notes.attach(log)
    log.note({"event": "resumed", "pid": os.getpid(), "position": state.position, "round": state.round})
