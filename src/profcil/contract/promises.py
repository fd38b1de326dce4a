"""What a method must honour, third-party ones too: each promise is looked at on tiny runs, and broken ones say why."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil import registry
from profcil.contract.stream import BUNDLES, DATASET, Crossed, guard, plan_of, quick, spy
from profcil.engine.channel import Door, When
from profcil.engine.executor import Executor
from profcil.engine.loop import RunState, play, stream, task_totals
from profcil.engine.payload import KINDS, ServerState
from profcil.engine.world import World, furnish
from profcil.errors import NotApplicable, ProfcilError
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL
from profcil.protocol.participation import participants
from profcil.protocol.plan import make_plan
from profcil.resolve import resolve
from profcil.runs.folder import RunFolder

TINY = {"warmup.rounds": 0, "train.rounds": 3, "train.epochs": 1, "train.batch": 8, "model.width": 4, "workers": 1}
STREAM = {"clients": 3, "participants": 2, "task_size": 2}
CLOSE = 1e-4  # how far rounding may take two ways of computing apart within two rounds


@dataclass
class Played:
    """A run in memory, and the server before the stream and after every position."""

    world: World
    method: Any
    state: RunState
    after: list[ServerState] = field(default_factory=list)
    crossed: Crossed = field(default_factory=Crossed)
    saved: RunState | None = None  # in the middle of the second position, as a run folder gives it back
    touched: str = ""  # whose global random numbers were drawn

    def to_the_end(self, folder: Path | None = None) -> Played:
        self.after.append(self.state.server)

        def watch(what: str, when: When, facts: dict) -> None:
            if what == "position":
                self.after.append(self.state.server)
            if folder and (what, when.position, when.round) == ("round", 1, 1):
                with RunFolder(folder) as kept:
                    kept.save(self.state, "", {})
                    self.saved = kept.load(torch.device("cpu"))[0]

        stream(self.world, self.method, self.state, watch)
        return self


@dataclass
class Case:
    """A method on one kind of data; its run is played once."""

    name: str
    modality: str
    run: Played | None = None

    def begin(self, planned: bool = True, setting: str = "severe", **settings: Any) -> Played:
        """A run that has not begun; with a normalisation that the method accepts."""
        flags = {"method": self.name, "dataset": DATASET[self.modality], "setting": setting}
        wanted = {**TINY, **STREAM, **{f"params.{k}": v for k, v in quick(self.name).items()}, **settings}
        try:
            return made(resolve(None, flags, wanted), self.modality, planned)
        except NotApplicable:
            return made(resolve(None, flags, wanted | {"model.norm": "batch"}), self.modality, planned)

    @property
    def played(self) -> Played:
        if self.run is None:
            run = self.begin()
            spy(run.method, run.crossed)
            with TemporaryDirectory() as folder:
                before = random_states()
                run.to_the_end(Path(folder) / "run")
                run.touched = ", ".join(k for k, v in random_states().items() if v != before[k])
            self.run = run
        return self.run


def made(config: Any, modality: str, planned: bool) -> Played:
    bundle = BUNDLES[modality]()
    labels = bundle.train.y.numpy()
    draw = plan_of if planned else make_plan
    world = furnish(config, bundle, draw(labels, bundle.facts.classes, config.stream, config.seed))
    method = registry.find("methods", config.method).METHOD(config.params)
    with torch.no_grad():
        server = method.begin(world.net.weights((*MODEL, *world.net.attached)))
    return Played(world, method, RunState(server, Scores.empty(world.plan.positions, task_totals(world)), Ledger()))


def random_states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpy[1].tobytes(), numpy[2]),
        "random": random.getstate(),
    }


# -- the promises: what is wrong, or nothing --------------------------------------------------------------------------


def runs(case: Case) -> str:
    run = case.played
    held = [b.tensors for b in run.state.server.blocks.values()] + list(run.state.private.values())
    if not all(bool(torch.isfinite(t).all()) for tensors in held for t in tensors.values() if t.is_floating_point()):
        return "the server or a client ends with numbers that are none"
    return "" if (run.state.scores.correct[-1] >= 0).all() else "a task that was introduced has no score"


def kinds(case: Case) -> str:
    method, server = case.played.method, case.played.state.server
    odd = sorted({*method.kinds, *(b.kind for b in server.blocks.values())} - {*KINDS})
    return f"{', '.join(odd)}: there is no such kind; the kinds are {', '.join(KINDS)}" if odd else ""


def metered(case: Case) -> str:
    run = case.played
    sent = {k: v for k, v in run.crossed.bytes.items() if v}
    booked = {(way, kind): run.state.ledger.total(direction=way, kind=kind) for way in ("down", "up") for kind in KINDS}
    wrong = [key for key in booked if booked[key] != sent.get(key, 0)]
    told = [f"{way} {kind}: {booked[way, kind]} bytes booked, {sent.get((way, kind), 0)} used" for way, kind in wrong]
    return "; ".join(told)


def labels(case: Case) -> str:
    run = case.played
    plan, scores = run.world.plan, run.state.scores
    for p in range(plan.positions):
        if (scores.correct[p] >= 0).tolist() != [set(t) <= plan.seen(p) for t in plan.tasks]:
            return f"at position {p} other tasks have scores than were introduced"
    strange = {n: set(b.labels) - plan.seen(plan.positions - 1) for n, b in run.state.server.blocks.items()}
    return "; ".join(f"block {n} is about classes {sorted(s)} that nobody has seen" for n, s in strange.items() if s)


def idle(case: Case) -> str:
    run = case.played
    for e in run.state.ledger.entries:
        if e.client not in run.world.plan.active(e.position):
            return f"client {e.client} has no data at position {e.position} and was sent something"
    own = [n for n in run.state.server.blocks if run.method.server_gradients and n not in MODEL]
    same = [same_bits(a.drop(*own), b.drop(*own)) for a, b in pairwise(run.after)]
    return "" if same[2] else "a position in which nobody has data changes the server"


def alone(case: Case) -> str:
    single: dict[str, Any] = {"clients": 1, "participants": 1, "train.rounds": 1}
    run = case.begin(planned=False, setting="homogeneous", **single).to_the_end()
    return "" if (run.state.scores.correct[-1] >= 0).all() else "a task has no score"


def resumes(case: Case) -> str:
    run, again = case.played, case.begin()
    assert run.saved is not None
    again.state = run.saved
    again.to_the_end()
    if not same_bits(run.state.server, again.state.server):
        return "picked up from a saved state, the server ends elsewhere"
    if run.state.ledger.entries != again.state.ledger.entries:
        return "picked up from a saved state, other bytes are sent"
    own, other = (dict(r.state.private.items()) for r in (run, again))
    same = own.keys() == other.keys() and all(same_tensors(own[c], other[c]) for c in own)
    return "" if same else "picked up from a saved state, a client keeps something else"


def undisturbed(case: Case) -> str:
    return f"numbers were drawn from the global generator of {case.played.touched}" if case.played.touched else ""


class Backwards(Executor):
    """Takes the turns in another order, under other global random states."""

    def __call__(self, turns: Any, guard: Any) -> Any:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(len(turns))
        return super().__call__(dict(reversed(turns.items())), guard)


def order(case: Case) -> str:
    again = case.begin()
    again.world.executor.__class__ = Backwards
    again.to_the_end()
    same = same_bits(case.played.state.server, again.state.server)
    return "" if same else "clients computed in another order, under other global random states, end elsewhere"


def together(case: Case) -> str:
    """By SGD: where a gradient is all but zero, Adam makes whole steps of its rounding."""
    servers = []
    for executor in ("serial", "stacked"):
        wanted: dict[str, Any] = {"train.lr": 0.01, "train.optimiser": "sgd", "participants": 3, "train.batch": 4}
        run = case.begin(executor=executor, **wanted)
        door = Door(run.state.ledger, run.world.config.transfer, held=run.state.held)
        for r in range(2):
            when, clients = When("round", 0, r, run.world.config.train.rounds), participants(run.world.plan, 0, r)
            run.state.server = play(run.world, run.method, run.state, door, clients, when)[0]
        servers.append(tensors_of(run.state.server))
    one, two = servers
    if one.keys() != two.keys():
        return "computed one by one and together, the server holds different things"
    far = max(float((one[k].double() - two[k].double()).abs().max()) for k in one if one[k].numel())
    return "" if far < CLOSE else f"computed one by one and together, clients come {far:.2g} apart"


def untouched(case: Case) -> str:
    """Whatever its losses compete over: what is replayed may be among it, or not."""
    fields = {f.name: f.metadata.get("choices", ()) for f in dataclasses.fields(case.played.world.config.params)}
    spaces = {name: choices for name, choices in fields.items() if name.endswith("_space") and choices}
    for i in range(max(map(len, spaces.values()), default=1)):
        chosen = {name: choices[i % len(choices)] for name, choices in spaces.items()}
        run, changed = case.begin(**{f"params.{name}": space for name, space in chosen.items()}), set[str]()
        guard(run.method, changed)
        run.to_the_end()
        if changed:
            where = "".join(f" with {name}={space}" for name, space in chosen.items())
            return f"a client writes into {', '.join(sorted(changed))}{where}; others read it, too: take a copy"
    return ""


def nothing_hidden(case: Case) -> str:
    more = vars(case.played.method).keys() - {"params"}
    if more:
        return f"the method keeps {', '.join(sorted(more))} on itself; what must survive a call goes in and comes out"
    return "" if case.played.method.params == case.played.world.config.params else "the method changes its settings"


def explained(name: str) -> str:
    params: Any = registry.find("methods", name).METHOD.Params
    if not dataclasses.is_dataclass(params) or not vars(params)["__dataclass_params__"].frozen:
        return "Params is not a frozen dataclass"
    bare = [f.name for f in dataclasses.fields(params) if not f.metadata.get("help")]
    free = [f.name for f in dataclasses.fields(params) if f.default is dataclasses.MISSING]
    told = [(bare, "no help text"), (free, "no default")]
    return "; ".join(f"{', '.join(names)}: {what}, use profcil.config.setting" for names, what in told if names)


SETTINGS = "its settings are frozen, and each has a default and a help text"
RUNS = "plays a stream with idle clients, single examples and returning classes; sends only the kinds it declares"
PROMISES: Mapping[str, Callable[[Case], str]] = {
    RUNS: runs,
    "declares kinds that there are": kinds,
    "every byte that it sends or gets is in the ledger": metered,
    "labels are sets of class ids, in any order": labels,
    "an idle client is sent nothing, and an idle position changes nothing": idle,
    "plays with a single client": alone,
    "a saved state goes on as if nothing had happened, to the bit": resumes,
    "leaves the global random states alone": undisturbed,
    "neither the order of clients nor global random states change a bit": order,
    "clients computed together come to what each comes to alone": together,
    "a client changes nothing that it was given": untouched,
    "holds nothing but its settings": nothing_hidden,
}


def check(name: str) -> Iterator[dict[str, Any]]:
    """Every promise on every kind of data that the method claims. Where a stream cannot be played, the rest of that
    data is left out. `holds` is None where there is nothing to look at it with."""
    yield row(SETTINGS, "", explained(name))
    for modality in (m for m in BUNDLES if m in registry.find("methods", name).METHOD.modalities):
        if modality == "graph" and find_spec("torch_geometric") is None:
            yield {**row(RUNS, modality, "graphs need torch-geometric; `pip install 'profcil[graph]'`"), "holds": None}
            continue
        case = Case(name, modality)
        for promise, look in PROMISES.items():
            try:
                wrong = look(case)
            except ProfcilError as error:
                wrong = str(error)
            except Exception as error:  # a stranger's code
                wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield row(promise, modality, wrong)
            if wrong and promise == RUNS:
                break


def row(promise: str, data: str, wrong: str) -> dict[str, Any]:
    return {"promise": promise, "data": data, "holds": not wrong, "why_not": wrong}


def tensors_of(server: ServerState) -> dict[str, Tensor]:
    return {f"{n}/{k}": t for n, b in server.blocks.items() for k, t in b.tensors.items()}


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_bits(a: ServerState, b: ServerState) -> bool:
    one, two = ({n: (x.kind, x.labels) for n, x in s.blocks.items()} for s in (a, b))
    return one == two and same_tensors(tensors_of(a), tensors_of(b))
