"""A whole run: world, warm-up, stream, and a folder that can be picked up at any moment."""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from profcil import __version__, registry
from profcil.config import plain
from profcil.engine.channel import When
from profcil.engine.client_store import Parked
from profcil.engine.loop import RunState, stream, task_totals
from profcil.engine.snapshots import save_memory
from profcil.engine.warmup import warm
from profcil.engine.world import World, device_of, make_world
from profcil.errors import Failure, ProfcilError, RunFolderError
from profcil.io.interrupts import ignore_interrupts
from profcil.metrics.client_first import summary
from profcil.metrics.ledger import Ledger, stream_bytes
from profcil.metrics.scores import Scores
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig, resolve
from profcil.runs.folder import RunFolder
from profcil.runs.settings_check import check_settings, flatten_settings

SAVE_SECONDS = 60  # a state is saved after a round when the last one is this old
BRIEF_SECONDS = 10  # and after a position when it is this old: what takes less is sooner played again than saved


class Interrupted(Failure):
    """Ctrl-C: everything up to the last whole round is saved."""


@dataclass
class Progress:
    """What an observer is told after every warm-up round, round and position."""

    what: str
    when: When
    done: int
    total: int
    facts: dict[str, Any]


Observer = Callable[[Progress], None]


def start(config: RunConfig, out: Path, data_dir: Path, observe: Observer = lambda p: None) -> Path:
    """A new run in a new folder."""
    with RunFolder(out) as folder:
        folder.check_new()
        world = prepare(config, data_dir, folder)
        folder.begin(config, world.plan)
        keeper = Keeper(world, folder, observe, data_dir)
        try:
            warmed = warm(world, keeper.watch)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted in the warm-up, before a first state of {out}; start it again with the same command"
            ) from None
        keeper.began = time.perf_counter()  # the stream's clock: neither the warm-up nor waiting for one is in it
        method = registry.find("methods", config.method).METHOD(config.params)
        scores = Scores.empty(world.plan.positions, task_totals(world))
        keeper.facts |= {"warmup_seconds": warmed.seconds, "warmup_cached": warmed.cached}
        with torch.no_grad():
            server = method.begin(warmed.weights)
        private = Parked(folder.clients, world.device)
        keeper.hold(RunState(server, scores, Ledger(list(warmed.ledger.entries)), private=private))
        keeper.save()
        folder.wait_until_written()  # from here on a run that is killed can be resumed
        return finish(keeper, method)


def resume(path: Path, data_dir: Path | None = None, observe: Observer = lambda p: None) -> Path:
    """Goes on with a run from its last saved state; a finished one is left as it is."""
    if not (Path(path) / "config.toml").exists():
        raise RunFolderError(
            f"{path} is not a run folder (it has no config.toml); give the folder that `profcil run` named"
        )
    config = resolve(str(Path(path) / "config.toml"))
    with RunFolder(path) as folder:
        state, events, saved = folder.load(device_of(config.device))
        check_settings(folder.path, saved["config"], settings_of(config))
        planned = has_plan(folder.path, saved["plan"])
        if saved["done"] and planned:
            return folder.path
        data_dir = Path(data_dir or saved["data_dir"])
        keeper = Keeper(prepare(config, data_dir, folder), folder, observe, data_dir)
        check_data(Path(path), keeper.world, saved, data_dir)
        if not planned:
            folder.begin(config, keeper.world.plan, events)
        if saved["done"]:
            return folder.path
        keeper.hold(state, events)
        keeper.pick_up(saved)
        return finish(keeper, registry.find("methods", config.method).METHOD(config.params))


def has_plan(path: Path, digest: str) -> bool:
    """Whether the plan beside a state is the one that it was made by."""
    try:
        return Plan.load(path / "plan.npz").digest == digest
    except ProfcilError:
        return False


def check_data(path: Path, world: World, saved: Mapping[str, Any], data_dir: Path) -> None:
    """The data and the plan drawn from it are those that the run began with."""
    if (world.bundle.fingerprint, world.plan.digest) != (saved["data"], saved["plan"]):
        raise RunFolderError(f"the data under {data_dir} is not what {path} began with; give the same --data-dir")


def prepare(config: RunConfig, data_dir: Path, folder: RunFolder) -> World:
    """The world, and room on the disk for what will be made in it."""
    world = make_world(config, data_dir)
    folder.check_space(sum(t.numel() * t.element_size() for t in world.net.state_dict().values()))
    return world


def finish(keeper: Keeper, method: Any) -> Path:
    """Plays the stream to its end; the last position's state is the run's."""
    try:
        stream(keeper.world, method, keeper.state, keeper.watch)
        keeper.folder.wait_until_written()
    except KeyboardInterrupt:
        with ignore_interrupts():
            keeper.save()
            keeper.folder.wait_until_written()
        raise Interrupted(
            f"interrupted; everything up to the last whole round is saved, "
            f"go on with `profcil resume {keeper.folder.path}`"
        ) from None
    return keeper.folder.path


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted path; where a run is computed may change on the way, what is computed may not."""
    values = json.loads(json.dumps(plain(config)))
    return {k: v for k, v in flatten_settings(values).items() if k not in ("device", "threads", "workers")}


class Keeper:
    """Watches a run: tells the observer, writes events, saves states, keeps time."""

    state: RunState  # alive: a round may be half done in it
    whole: tuple[RunState, str]  # the state after the last whole round and the events up to it; all that is saved

    def __init__(self, world: World, folder: RunFolder, observe: Observer, data_dir: Path) -> None:
        self.world, self.folder, self.observe = world, folder, observe
        self.facts: dict[str, Any] = {
            "config": settings_of(world.config),
            "plan": world.plan.digest,
            "data": world.bundle.fingerprint,
            "data_dir": str(Path(data_dir).absolute()),
            "version": __version__,
            "environment": environment(world),
            "seconds": 0.0,
            "warmup_seconds": 0.0,
        }
        self.began = self.saved = time.perf_counter()
        self.before = 0.0
        self.earlier: list[dict[str, Any]] = []  # how earlier processes computed their part of the run

    def hold(self, state: RunState, events: str = "") -> None:
        """Takes the state as a whole one: a copy, out of reach of whatever breaks off the next round."""
        self.state = state
        copy = replace(
            state,
            scores=Scores(state.scores.correct.copy(), state.scores.total),
            ledger=Ledger(list(state.ledger.entries)),
            held=dict(state.held),
            private=state.private.copy(),
            tally=dict(state.tally),
        )
        self.whole = copy, events

    def pick_up(self, saved: dict[str, Any]) -> None:
        """The facts of the part that has already run."""
        self.facts |= {k: v for k, v in saved.items() if k not in ("environment", "version", "data_dir")}
        self.before = saved["seconds"]
        self.earlier = list(saved.get("execution", []))
        self.began = time.perf_counter()

    def watch(self, what: str, when: When, facts: dict[str, Any]) -> None:
        c = self.world.config
        total = c.train.rounds * self.world.plan.positions if what != "warmup" else c.warmup.rounds
        done = when.round + 1 + (when.position * c.train.rounds if what != "warmup" else 0)
        self.observe(Progress(what, when, done, total, facts))
        if what == "warmup":
            return
        seconds = round(self.before + time.perf_counter() - self.began, 3)
        event = {"event": what, "position": when.position, "round": when.round, "seconds": seconds, **facts}
        if what == "position":
            event["resident_mb"] = resident_mb()
            if c.keep_memories:
                with self.folder.explain_write_errors(
                    f"free some space, then continue with `profcil resume {self.folder.path}`"
                ):
                    save_memory(self.folder.path, self.world, self.state.server, when.position)
        self.folder.append(line := json.dumps(event) + "\n")
        self.hold(self.state, self.whole[1] + line)
        age, ends = time.perf_counter() - self.saved, what == "position"
        if age > SAVE_SECONDS or (ends and (age > BRIEF_SECONDS or self.state.position == self.world.plan.positions)):
            self.save()

    def save(self) -> None:
        world, (state, events) = self.world, self.whole
        self.facts["seconds"] = self.before + time.perf_counter() - self.began
        self.facts["peak_memory_mb"] = max(self.facts.get("peak_memory_mb", 0.0), peak_memory_mb(world))
        self.facts |= {"server_memory_bytes": state.server_bytes, "client_extra_bytes": state.client_bytes}
        self.facts |= {"tally": state.tally, "execution": [*self.earlier, world.executor.report()]}
        self.facts["done"] = state.position == world.plan.positions
        self.facts["bytes"] = stream_bytes(state.ledger.entries)
        if self.facts["done"]:
            self.facts["metrics"] = summary(state.scores.correct, state.scores.total, world.plan.orders)
        self.folder.save(state, events, self.facts)
        self.saved = time.perf_counter()


def peak_memory_mb(world: World) -> float:
    """The process's peak resident memory, or the GPU's where one is used: all that was held there, because what a
    recorded step works on is no longer counted as allocated."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6  # macOS tells bytes, Linux KiB


def resident_mb() -> float | None:
    """The process's resident memory now; unknown where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    except (OSError, IndexError, ValueError):
        return None


def environment(world: World) -> dict[str, Any]:
    """What a reader needs to judge a number."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
