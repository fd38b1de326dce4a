"""The server's side: the same run as the simulation, in a run folder, with its clients on Flower's grid.

If the folder already has a state, the run is resumed from it. A state is saved after every round, because a round takes
seconds and a restarted server should repeat none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from profcil import registry as plugins
from profcil.deploy.policy import Policy
from profcil.deploy.server.fleet import FlowerFleet
from profcil.deploy.server.growth import SiteGrowth
from profcil.deploy.server.mailbox import Mailbox
from profcil.deploy.server.node_registry import NodeRegistry
from profcil.engine import dictionary
from profcil.engine.channel import ServerState, When
from profcil.engine.device import device_of
from profcil.engine.dictionary import prepare_dictionary
from profcil.engine.evaluation import task_totals
from profcil.engine.loop import stream
from profcil.engine.recorder import Observer, RunRecorder, settings_of
from profcil.engine.run import has_plan
from profcil.engine.run_state import RunState
from profcil.engine.warmup import WarmupResult, compute
from profcil.engine.world import World
from profcil.errors import RunFolderError
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL, Weights
from profcil.runs.folder import RunFolder
from profcil.runs.models.saved_model import NAME as MODEL_FILE
from profcil.runs.settings_check import check_settings


class DeploymentRecorder(RunRecorder):
    """Records a deployment: events between rounds, too, and a state after every round and position."""

    def record(self, event: Mapping[str, Any]) -> None:
        """Writes an event. It is also added to the events of the last state, so that a resumed run still has it."""
        line = json.dumps(dict(event)) + "\n"
        self.folder.append(line)
        state, events = self.whole
        self.whole = state, events + line

    def watch(self, what: str, when: When, facts: dict[str, Any]) -> None:
        super().watch(what, when, facts)
        if not when.before_stream:
            self.save()

    def save(self) -> None:
        """Saves and waits until the state is on disk: the next requests depend on it."""
        super().save()
        self.folder.wait_until_written()


@dataclass
class EventBuffer:
    """Passes events to the recorder. Events from before the recorder exists are stored until it is attached."""

    recorder: DeploymentRecorder | None = None
    stored: list[Mapping[str, Any]] = field(default_factory=list)

    def record(self, event: Mapping[str, Any]) -> None:
        if self.recorder:
            self.recorder.record(event)
        else:
            self.stored.append(event)

    def attach(self, recorder: DeploymentRecorder) -> None:
        self.recorder = recorder
        for event in self.stored:
            recorder.record(event)


def serve(
    world: World,
    out: Path,
    data_dir: Path,
    registry: NodeRegistry,
    events: EventBuffer,
    policy: Policy,
    observe: Observer,
) -> Path:
    """Starts a run in a folder, or resumes the one in it."""
    config = world.config
    method = plugins.find("methods", config.method).METHOD(config.params)
    run_facts = {"run": registry.run, "plan": world.plan.digest, "data": world.bundle.fingerprint}
    with RunFolder(out) as folder:
        recorder = DeploymentRecorder(world, folder, observe, data_dir)
        # The key "deployed" stops `profcil resume` from continuing the run as a simulation, without the clients'
        # private tensors.
        recorder.facts |= {"run": registry.run, "config": {**settings_of(config), "deployed": "flower"}}
        mailbox = Mailbox(registry.grid, events.record)
        world.fleet = fleet = FlowerFleet(mailbox, registry, policy, run_facts, events.record)
        recorder.facts |= {"sites": fleet.sites, "keys": registry.bindings.known}
        if isinstance(world.growth, SiteGrowth):
            recorder.facts["enrolment"] = world.growth.enrolment.to_json()
        if folder.has_state:
            resume_run(recorder, fleet, events)
        else:
            folder.begin(config, world.plan)
            begin_run(recorder, method, events)
        if recorder.state.position < world.plan.positions:
            stream(world, method, recorder.state, recorder.watch)
        if not (folder.path / MODEL_FILE).exists():
            recorder.save_model(method)
        return folder.path


def begin_run(recorder: DeploymentRecorder, method: Any, events: EventBuffer) -> None:
    """Runs the stages before the stream and saves the first state."""
    world = recorder.world
    scores = Scores.empty(world.plan.positions, task_totals(world))
    # Events are recorded with a state, so there is a provisional one during the warm-up.
    recorder.hold(RunState(ServerState().put_weights(initial_weights(world)), scores, Ledger()))
    events.attach(recorder)
    recorder.record({"event": "started", "pid": os.getpid()})
    warmed = warm_up(recorder)
    found = prepare_dictionary(world, method, recorder.watch, dictionary.compute)
    recorder.facts |= {"warmup_seconds": warmed.seconds, "warmup_cached": False, "dictionary_seconds": found.seconds}
    ledger = Ledger([*warmed.ledger.entries, *found.ledger.entries])
    state = initial_state(method, found.added_to(warmed.weights), scores, ledger)
    recorder.hold(state, recorder.whole[1])
    recorder.save()


def initial_weights(world: World) -> Weights:
    return world.net.weights((*MODEL, *world.net.attached))


def initial_state(method: Any, weights: Weights, scores: Scores, ledger: Ledger) -> RunState:
    with torch.no_grad():
        return RunState(method.begin(weights), scores, ledger)


def warm_up(recorder: DeploymentRecorder) -> WarmupResult:
    """The warmed model, always computed by the connected clients. The cache of simulations is not used."""
    world = recorder.world
    if not world.config.warmup.rounds:
        return WarmupResult(initial_weights(world), 0.0, False, Ledger())
    return compute(world, recorder.watch)


def resume_run(recorder: DeploymentRecorder, fleet: FlowerFleet, events: EventBuffer) -> None:
    """Loads the last saved state, if it has the same settings, data and plan."""
    state, lines, saved = recorder.folder.load(device_of(recorder.world.config.device))
    check_settings(recorder.folder.path, saved["config"], recorder.facts["config"])
    for what in ("data", "plan"):
        if recorder.facts[what] != saved[what]:
            raise RunFolderError(
                f"{recorder.folder.path} was started with another {what}; give the same data and settings"
            )
    if not has_plan(
        recorder.folder.path, saved["plan"]
    ):  # the server was killed before it wrote the plan that has grown
        recorder.folder.save_plan(recorder.world.plan)
    recorder.hold(state, lines)
    recorder.continue_from(saved)
    fleet.sites |= saved.get("sites", {})
    fleet.registry.bindings.known |= saved.get("keys", {})
    recorder.facts |= {"sites": fleet.sites, "keys": fleet.registry.bindings.known}
    events.attach(recorder)
    recorder.record({"event": "resumed", "pid": os.getpid(), "position": state.position, "round": state.round})
