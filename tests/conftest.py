"""Fixtures of all tests: tiny real runs with a few clients on digits and a narrow encoder, under a second each."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
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
from profcil.contract.case import without_recipe
from profcil.engine import world as worlds
from profcil.engine.channel import Channel, Reply, ServerState, When
from profcil.engine.client_exchange import turns
from profcil.engine.dictionary import find_entries, prepare_dictionary
from profcil.engine.evaluation import task_totals
from profcil.engine.loop import compute_round, stream
from profcil.engine.run_state import RunState
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

# A background job of a shell ignores SIGINT, and one under nohup SIGHUP; the tests of signals need the defaults.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_given_methods() -> Iterator[None]:
    """A method class that a test gave from Python is unknown to the next test."""
    yield
    registry.GIVEN_METHODS.clear()


@pytest.fixture(autouse=True, scope="session")
def one_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, and a cache of warm-ups for this session only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PROFCIL_CACHE", str(tmp_path_factory.mktemp("profcil")))
        torch.set_num_threads(1)
        yield


@dataclass
class Run:
    """A run in memory, with the server state after every round and position (states are never modified in place)."""

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
        """The replies of a round from the current state, without aggregation."""
        channel = Channel(Ledger(), self.world.config.transfer)
        clients = self.clients(position, round)
        when = self.when(position, round)
        return turns(self.world, self.method, self.state, channel, clients, when)

    def play(self, position: int, round: int) -> ServerState:
        """Runs one whole round and updates the state."""
        channel = Channel(self.state.ledger, self.world.config.transfer, held=self.state.held)
        clients = self.clients(position, round)
        when = self.when(position, round)
        self.state.server = compute_round(self.world, self.method, self.state, channel, clients, when)[0]
        return self.state.server

    def stream(self, watch: Callable[[str, When, dict], None] = lambda *a: None) -> Run:
        """Runs the whole stream and records the server states in `trail`."""

        def record(what: str, when: When, facts: dict) -> None:
            self.trail.append((what, when, self.state.server))
            watch(what, when, facts)

        self.trail.append(("start", self.when(0, 0), self.state.server))
        stream(self.world, self.method, self.state, record)
        return self

    def before(self) -> dict[tuple[int, int], ServerState]:
        """The server state before each round, by position and round."""
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
    """A run after the stages before the stream. A dot in a name is written as a double underscore.

    With `all_seen` every loss is over all seen classes.
    """
    is_pro = method in ("pro", "promax")
    literal = LITERAL if is_pro else {}
    label_spaces = dict.fromkeys(PHASES if is_pro else ("label_space",), "seen") if all_seen else {}
    plain = without_recipe(method, dataset) if method == "prolin" else {}  # its chosen settings have no moving base
    wanted = TINY | literal | plain | label_spaces | {k.replace("__", "."): v for k, v in settings.items()}
    flags = {"method": method, "dataset": dataset, "setting": setting, "seed": seed}
    world = make_world(resolve(None, flags, [f"{k}={v}" for k, v in wanted.items()]), Path("nowhere"))
    warmed = warm(world, lambda *a: None)
    made = registry.find("methods", method).METHOD(world.config.params)
    found = prepare_dictionary(world, made, lambda *a: None, find_entries)
    scores = Scores.empty(world.plan.positions, task_totals(world))
    ledger = Ledger([*warmed.ledger.entries, *found.ledger.entries])
    return Run(world, made, RunState(made.begin(found.added_to(warmed.weights)), scores, ledger))


@pytest.fixture(scope="session")
def fresh() -> Callable[..., Run]:
    """Makes a new run, which a test may modify."""
    return begin


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Run]:
    """Makes finished runs, each only once. Tests must not modify them."""
    done: dict[tuple, Run] = {}

    def make(method: str = "pro", **settings: Any) -> Run:
        key = (method, *sorted(settings.items()))
        if key not in done:
            done[key] = begin(method, **settings).stream()
        return done[key]

    return make


def flat_blocks(state: ServerState) -> dict[str, Tensor]:
    """All tensors of a server state by block and name."""
    return {f"{name}/{key}": tensor for name, b in state.blocks.items() for key, tensor in b.tensors.items()}


def described(state: ServerState) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and labels of every block."""
    return {name: (block.kind, block.labels) for name, block in state.blocks.items()}


@pytest.fixture(scope="session")
def same_bits() -> Callable[[ServerState, ServerState], bool]:
    """Whether two server states have the same blocks, bit for bit."""

    def same(a: ServerState, b: ServerState) -> bool:
        if described(a) != described(b):
            return False
        first = flat_blocks(a)
        second = flat_blocks(b)
        return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)

    return same


@pytest.fixture(scope="session")
def max_difference() -> Callable[[ServerState, ServerState], float]:
    """The largest absolute difference between the tensors of two server states."""

    def largest(a: ServerState, b: ServerState) -> float:
        first = flat_blocks(a)
        second = flat_blocks(b)
        assert first.keys() == second.keys()
        return max(float((first[k].double() - second[k].double()).abs().max()) for k in first if first[k].numel())

    return largest


@pytest.fixture
def assign_samples(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the division of the samples: `assign_samples(lambda labels, tasks: owner)`, where -1 means no owner."""

    def use(owner: Callable[[Any, Any], Any], orders: list[list[int]] | None = None) -> None:
        import numpy as np

        from profcil.protocol.plan_making import assemble
        from profcil.protocol.tasks import class_order, split

        def make(labels: Any, classes: int, settings: Any, seed: int) -> Any:
            tasks = split(class_order(classes, seed), settings.task_size)
            given = orders or [list(range(len(tasks)))] * settings.clients
            return assemble(labels, np.asarray(owner(labels, tasks)), tasks, np.array(given), settings, seed)

        monkeypatch.setattr(worlds, "make_plan", make)

    return use


@pytest.fixture
def register_method(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Registers a method class as the plug-in `registered`, without installing a package."""

    def register(method: type) -> None:
        module: Any = ModuleType("registered", "Registered: a method of another package.")
        module.METHOD = method
        entry = SimpleNamespace(load=lambda: module, dist=None, value="registered", module="registered")
        monkeypatch.setattr(registry, "plugins", lambda group: {"registered": entry} if group == "methods" else {})

    return register


def write_package(home: Path, version: str, entries: dict[str, dict[str, str]]) -> Path:
    """Writes the package `otherpkg` with its metadata, as pip would install it."""
    package = home / "otherpkg"
    metadata = home / "otherpkg-0.dist-info"
    shutil.rmtree(package / "__pycache__", ignore_errors=True)
    for folder in (package, metadata):
        folder.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: otherpkg\nVersion: {version}\n")
    lines = []
    for group, points in entries.items():
        lines += [f"[profcil.{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return package


def forget_package(cached: tuple[Any, ...]) -> None:
    """Clears these caches, and the imported modules of `otherpkg`."""
    for function in cached:
        function.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] == "otherpkg"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Installs a package with plug-ins: `install_plugin(methods={"mine": source})` adds the method `mine`.

    A second call adds to the package and replaces modules of the same name. A value `=text` is an entry point itself,
    not the source of a module.
    """
    home = tmp_path / "outside"
    entries: dict[str, dict[str, str]] = {group: {} for group in registry.GROUPS}
    cached = (registry.plugins, registry.plugin_origin)  # taken now: a test may replace them

    def install(version: str = "0.1", **given: dict[str, str]) -> Path:
        for group, modules in given.items():
            for name, source in modules.items():
                entries[group][name] = source.removeprefix("=") if source.startswith("=") else f"otherpkg.{name}"
        package = write_package(home, version, entries)
        for modules in given.values():
            for name, source in modules.items():
                if not source.startswith("="):
                    (package / f"{name}.py").write_text(source)
        forget_package(cached)
        return package

    monkeypatch.syspath_prepend(str(home))
    yield install
    monkeypatch.undo()
    forget_package(cached)
