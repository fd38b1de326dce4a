"""Tiny real runs, shared by all tests: a few clients on digits with a narrow encoder, under a second each."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from torch import Tensor

from profcil import registry
from profcil.engine import world as worlds
from profcil.engine.channel import Door, When
from profcil.engine.loop import RunState, play, stream, task_totals, turns
from profcil.engine.payload import Reply, ServerState
from profcil.engine.warmup import warm
from profcil.engine.world import World, make_world
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.participation import participants
from profcil.resolve import resolve

TINY = {"warmup.rounds": 1, "train.rounds": 3, "train.epochs": 1, "model.width": 4, "clients": 4, "participants": 3}
LITERAL = {
    "fit_when_frozen": "true",
    "refresh_at": "final",
    "noise": 0.1,
    "proximal": 0.01,
}  # PRO as in the paper's text
PHASES = ("fit_space", "rehearse_space")  # PRO has a label space for each phase

hypothesis_settings.register_profile("same every time", derandomize=True)
hypothesis_settings.load_profile("same every time")

# A shell's background job ignores Ctrl-C, and so would every test of it.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, and a warm-up cache of our own that lives as long as the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PROFCIL_CACHE", str(tmp_path_factory.mktemp("profcil")))
        torch.set_num_threads(1)
        yield


@dataclass
class Run:
    """One run in memory, and the server after every round and position (server states are never changed in place)."""

    world: World
    method: Any
    state: RunState
    trail: list[tuple[str, When, ServerState]] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def server(self) -> ServerState:
        return self.state.server

    def clients(self, position: int, round: int) -> tuple[int, ...]:
        return participants(self.world.plan, position, round)

    def when(self, position: int, round: int) -> When:
        return When("round", position, round, self.world.config.train.rounds)

    def client(self, id: int, position: int, round: int) -> Any:
        return self.world.client(id, self.when(position, round))

    def turns(self, position: int, round: int) -> list[Reply]:
        """The replies of a round from the present state, without aggregating them."""
        door = Door(Ledger(), self.world.config.transfer)
        clients, when = self.clients(position, round), self.when(position, round)
        return turns(self.world, self.method, self.state, door, clients, when)

    def play(self, position: int, round: int) -> ServerState:
        """One whole round, kept."""
        door = Door(self.state.ledger, self.world.config.transfer, held=self.state.held)
        clients, when = self.clients(position, round), self.when(position, round)
        self.state.server = play(self.world, self.method, self.state, door, clients, when)[0]
        return self.state.server

    def stream(self, watch: Callable[[str, When, dict], None] = lambda *a: None) -> Run:
        def both(what: str, when: When, facts: dict) -> None:
            self.trail.append((what, when, self.state.server))
            watch(what, when, facts)

        self.trail.append(("start", self.when(0, 0), self.state.server))
        stream(self.world, self.method, self.state, both)
        return self

    def before(self) -> dict[tuple[int, int], ServerState]:
        """The server as each round found it."""
        pairs = zip(self.trail, self.trail[1:], strict=False)
        return {(when.position, when.round): old[2] for old, (what, when, _) in pairs if what == "round"}

    def after_positions(self) -> list[ServerState]:
        return [server for what, _, server in self.trail if what == "position"]


def begin(
    method: str = "pro",
    dataset: str = "digits",
    setting: str = "severe",
    seed: int = 0,
    all_seen: bool = False,
    **settings: Any,
) -> Run:
    """A run that has been warmed up and not yet started. Dots in names are written as double underscores. With
    `all_seen` every loss competes over all seen classes."""
    ours = method in ("pro", "promax")
    literal = LITERAL if ours else {}
    spaces = dict.fromkeys(PHASES if ours else ("label_space",), "seen") if all_seen else {}
    wanted = TINY | literal | spaces | {k.replace("__", "."): v for k, v in settings.items()}
    flags = {"method": method, "dataset": dataset, "setting": setting, "seed": seed}
    world = make_world(resolve(None, flags, [f"{k}={v}" for k, v in wanted.items()]), Path("nowhere"))
    warmed = warm(world, lambda *a: None)
    made = registry.find("methods", method).METHOD(world.config.params)
    scores = Scores.empty(world.plan.positions, task_totals(world))
    return Run(world, made, RunState(made.begin(warmed.weights), scores, Ledger(list(warmed.ledger.entries))))


@pytest.fixture(scope="session")
def fresh() -> Callable[..., Run]:
    """Makes a run that a test may play as it likes."""
    return begin


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Run]:
    """Makes finished runs, each only once; tests must not change them."""
    done: dict[tuple, Run] = {}

    def make(method: str = "pro", **settings: Any) -> Run:
        key = (method, *sorted(settings.items()))
        if key not in done:
            done[key] = begin(method, **settings).stream()
        return done[key]

    return make


def flat(weights: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{b}/{k}": t for b, tensors in weights.items() for k, t in tensors.items()}


@pytest.fixture(scope="session")
def same_bits() -> Callable[[ServerState, ServerState], bool]:
    """Whether two servers hold the same blocks, to the bit."""

    def same(a: ServerState, b: ServerState) -> bool:
        one, two = ({n: (x.kind, x.labels) for n, x in s.blocks.items()} for s in (a, b))
        first, second = (flat({n: dict(x.tensors) for n, x in s.blocks.items()}) for s in (a, b))
        return one == two and first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)

    return same


@pytest.fixture(scope="session")
def apart() -> Callable[[ServerState, ServerState], float]:
    """The largest difference between two servers' tensors."""

    def largest(a: ServerState, b: ServerState) -> float:
        first, second = (flat({n: dict(x.tensors) for n, x in s.blocks.items()}) for s in (a, b))
        assert first.keys() == second.keys()
        return max(float((first[k].double() - second[k].double()).abs().max()) for k in first if first[k].numel())

    return largest


@pytest.fixture
def deal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the division of the samples: `deal(lambda labels, tasks: owner of every sample, -1 = nobody)`."""

    def use(owner: Callable[[Any, Any], Any], orders: list[list[int]] | None = None) -> None:
        import numpy as np

        from profcil.protocol.plan import assemble
        from profcil.protocol.tasks import class_order, split

        def make(labels: Any, classes: int, settings: Any, seed: int) -> Any:
            tasks = split(class_order(classes, seed), settings.task_size)
            given = orders or [list(range(len(tasks)))] * settings.clients
            return assemble(labels, np.asarray(owner(labels, tasks)), tasks, np.array(given), settings, seed)

        monkeypatch.setattr(worlds, "make_plan", make)

    return use


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Puts a class of the test's own into the room of methods, as `guest` of another package."""

    def bring(method: type) -> None:
        module: Any = ModuleType("guest", "Guest: a method of another package.")
        module.METHOD = method
        point = SimpleNamespace(load=lambda: module, dist=None, value="guest", module="guest")
        monkeypatch.setattr(registry, "guests", lambda room: {"guest": point} if room == "methods" else {})

    return bring


@pytest.fixture
def outsider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Installs another package: `outsider(methods={"mine": source})` makes it bring the method `mine`, from a module of
    its own. Called again, it replaces what it is given. A value of the form `=text` is an entry point as it stands."""
    home, brought = tmp_path / "outside", {room: {} for room in registry.ROOMS}
    fresh = (registry.guests, registry.origin)

    def forget() -> None:
        for known in fresh:
            known.cache_clear()
        for name in [n for n in sys.modules if n.partition(".")[0] == "outsider"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def install(version: str = "0.1", **given: dict[str, str]) -> Path:
        package, about = home / "outsider", home / "outsider-0.dist-info"
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        for folder in (package, about):
            folder.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        for room, modules in given.items():
            for name, source in modules.items():
                brought[room][name] = source.removeprefix("=") if source.startswith("=") else f"outsider.{name}"
                if not source.startswith("="):
                    (package / f"{name}.py").write_text(source)
        tables = [[f"[profcil.{room}]", *(f"{k} = {v}" for k, v in es.items())] for room, es in brought.items()]
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: outsider\nVersion: {version}\n")
        (about / "entry_points.txt").write_text("\n".join(line for table in tables for line in table) + "\n")
        forget()
        return package

    monkeypatch.syspath_prepend(str(home))
    yield install
    monkeypatch.undo()
    forget()


@pytest.fixture
def interpreted() -> Callable[[str], None]:
    """Runs a program that asserts things about the GPU's kernels, by Triton's interpreter on a CPU: in float32, because
    it does not know bfloat16 tiles, and in a process of its own, because kernels are made for the interpreter or for a
    GPU when they are imported."""
    pytest.importorskip("triton")

    def run(program: str) -> None:
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run
