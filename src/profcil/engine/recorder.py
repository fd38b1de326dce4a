"""Records a run in its folder: events, saved states, facts, and what observers receive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profcil import __version__
from profcil.engine.channel import When
from profcil.engine.machine import environment, peak_memory_mb, resident_mb
from profcil.engine.run_state import RunState
from profcil.engine.snapshots import save_memory
from profcil.engine.world import World
from profcil.metrics.client_first import summary, summary_so_far
from profcil.metrics.scores import Scores
from profcil.privacy.meter import Meter
from profcil.resolve import RunConfig, plugin_origins, values_of
from profcil.runs.folder import RunFolder
from profcil.runs.identity import run_identity
from profcil.runs.models.saved_model import save_model
from profcil.runs.settings_check import flatten_settings

FREE_SETTINGS = ("device", "threads", "workers", "keep_states")
SAVE_SECONDS = 60  # a state is saved after a round if the last saved one is older than this
MIN_SAVE_SECONDS = 10  # and after a position if it is older than this; less is computed again faster than it is saved


@dataclass
class Progress:
    """What an observer receives after every warm-up round, round and position."""

    what: str  # warmup, dictionary, round or position
    when: When  # stage, position and round, counted from 0
    done: int  # rounds of the stage, and their total
    total: int
    facts: dict[str, Any]  # of a round: clients, skipped, loss; of a position: correct, classes, alignment
    so_far: dict[str, Any] = field(default_factory=dict)  # after a position: faa, cta, af (percent), bytes


Observer = Callable[[Progress], None]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted path, except those that may change when a run is resumed: where it is computed, and
    how many states it keeps."""
    values = flatten_settings(json.loads(json.dumps(values_of(config))))
    return {name: value for name, value in values.items() if name not in FREE_SETTINGS}


class RunRecorder:
    """Records a run: calls the observer, writes events, saves states, measures the time."""

    state: RunState  # the state that is being computed; a round may be incomplete in it
    whole: tuple[RunState, str]  # a copy of the state after the last complete round, and the events up to it

    def __init__(self, world: World, folder: RunFolder, observe: Observer, data_dir: Path) -> None:
        self.world = world
        self.folder = folder
        folder.keep_states = world.config.keep_states
        self.observe = observe
        self.facts: dict[str, Any] = {
            "config": settings_of(world.config),
            "plan": world.plan.digest,
            "data": world.bundle.fingerprint,
            "data_dir": str(Path(data_dir).absolute()),
            "version": __version__,
            "identity": run_identity(world.config),
            "environment": environment(world),
            "seconds": 0.0,
            "warmup_seconds": 0.0,
        }
        if origins := plugin_origins(world.config):
            self.facts["plugins"] = origins
        self.began = time.perf_counter()
        self.saved = self.began
        self.before = 0.0  # seconds of earlier processes
        self.earlier: list[dict[str, Any]] = []  # how earlier processes computed their part of the run

    def hold(self, state: RunState, events: str = "") -> None:
        """Keeps a copy of the state after a complete round, so that an interrupted round does not change what is
        saved."""
        self.state = state
        copy = replace(
            state,
            scores=Scores(state.scores.correct.copy(), state.scores.total),
            ledger=replace(state.ledger, entries=list(state.ledger.entries)),
            held=dict(state.held),
            row_histories=dict(state.row_histories),
            private=state.private.copy(),
            strikes=dict(state.strikes),
            tally=dict(state.tally),
            stopping=dict(state.stopping),
        )
        self.whole = (copy, events)

    def continue_from(self, saved: dict[str, Any]) -> None:
        """Takes over the facts of the part that earlier processes computed."""
        of_this_process = ("environment", "version", "data_dir")
        self.facts |= {name: value for name, value in saved.items() if name not in of_this_process}
        if saved.get("identity") != run_identity(self.world.config):
            self.facts["identity"] = {}  # two versions of the code, or two kinds of device
        self.before = saved["seconds"]
        self.earlier = list(saved.get("execution", []))
        self.began = time.perf_counter()

    def watch(self, what: str, when: When, facts: dict[str, Any]) -> None:
        """Called after every warm-up round, round and position: reports it, writes an event, saves if it is due."""
        progress = self.progress(what, when, facts)
        if what != "extended":
            self.observe(progress)
        if when.before_stream:
            return
        seconds = round(self.before + time.perf_counter() - self.began, 3)
        event = {"event": what, "position": when.position, "round": when.round, "seconds": seconds}
        known = (*event, "enrolment")  # notes overwrite nothing
        event |= {name: value for name, value in facts.items() if name not in known}
        event |= progress.so_far
        if what == "position":
            event["resident_mb"] = resident_mb()
            self.save_memory(when.position)
        line = json.dumps(event) + "\n"
        self.folder.append(line)
        self.hold(self.state, self.whole[1] + line)
        if what == "extended":
            self.save_extension(facts)
        elif self.save_is_due(what):
            self.save()

    def save_extension(self, facts: Mapping[str, Any]) -> None:
        """Saves the state with the plan and the data that it has from now on. The plan's file comes last: a resumed run
        writes it again where it is not that of the state."""
        self.facts |= {"plan": self.world.plan.digest, "data": self.world.bundle.fingerprint}
        self.facts["enrolment"] = facts["enrolment"]
        self.save()
        self.folder.wait_until_written()
        self.folder.save_plan(self.world.plan)

    def progress(self, what: str, when: When, facts: dict[str, Any]) -> Progress:
        """How many rounds of the warm-up or of the stream are done."""
        config = self.world.config
        if when.before_stream:
            return Progress(what, when, when.round + 1, when.rounds, facts)
        rounds = config.train.rounds
        done = when.position * rounds + when.round + 1
        so_far = self.results_so_far(when.position) if what == "position" else {}
        return Progress(what, when, done, rounds * self.world.plan.positions, facts, so_far)

    def results_so_far(self, position: int) -> dict[str, Any]:
        """FAA, CTA and AF as if the stream had ended after a position, and the bytes sent until then."""
        scores = self.state.scores
        metrics = summary_so_far(scores.correct, scores.total, self.world.plan.orders, position)
        seconds = simulated_seconds(self.state)
        simulated = {"simulated_time": seconds} if seconds else {}
        return {**metrics, "bytes": self.state.ledger.stream_bytes, **simulated}

    def save_memory(self, position: int) -> None:
        """Writes the class means of a position, if the setting `keep_memories` is on."""
        if not self.world.config.keep_memories:
            return
        with self.folder.explain_write_errors(
            f"free some space, then continue with `profcil resume {self.folder.path}`"
        ):
            save_memory(self.folder.path, self.world, self.state.server, position)

    def save_is_due(self, what: str) -> bool:
        """Whether the last saved state is too old, or the run has just ended."""
        age = time.perf_counter() - self.saved
        if age > SAVE_SECONDS:
            return True
        ended = self.state.position == self.world.plan.positions
        return what == "position" and (age > MIN_SAVE_SECONDS or ended or self.folder.keep_states > 0)

    def save(self) -> None:
        """Saves the state after the last complete round, and the facts about the run so far."""
        world = self.world
        self.seal()
        state, events = self.whole
        self.facts["seconds"] = self.before + time.perf_counter() - self.began
        self.facts["peak_memory_mb"] = max(self.facts.get("peak_memory_mb", 0.0), peak_memory_mb(world))
        self.facts["server_memory_bytes"] = state.server_bytes
        self.facts["client_extra_bytes"] = state.client_bytes
        self.facts["tally"] = state.tally
        if seconds := simulated_seconds(state):
            self.facts["simulated_seconds"] = seconds
        self.facts["execution"] = [*self.earlier, world.executor.report()]
        self.facts["date"] = datetime.now(UTC).date().isoformat()  # of the last saved state
        self.facts["done"] = state.position == world.plan.positions
        self.facts["bytes"] = state.ledger.stream_bytes
        if world.protection:
            self.facts["privacy"] = Meter(world.protection).facts(state.ledger.entries)
        if self.facts["done"]:
            self.facts["metrics"] = summary(state.scores.correct, state.scores.total, world.plan.orders)
        self.folder.save(state, events, self.facts)
        self.saved = time.perf_counter()

    def seal(self) -> None:
        """Drops the first entries of a long ledger and the first events, once they are on the disk."""
        entries, characters = self.folder.seal()
        state, events = self.whole
        for ledger in (state.ledger, self.state.ledger):
            ledger.seal(entries)
        self.whole = (state, events[characters:])

    def save_model(self, method: Any) -> None:
        """Writes the model file of a finished run."""
        path = self.folder.path
        with self.folder.explain_write_errors(f"the run is complete, and `profcil resume {path}` writes its model"):
            save_model(path, self.world, method, self.whole[0].server, self.facts["metrics"])


def simulated_seconds(state: RunState) -> float:
    """What simulated clocks show; 0 without them, also in a deployment, whose clients take real time."""
    return state.arrivals.clock.time if state.arrivals else 0.0
