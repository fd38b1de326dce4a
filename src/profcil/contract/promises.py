"""The contract of a method, third-party ones included: each promise is checked on tiny runs.

A check returns what is wrong, as one sentence; an empty string means that the promise holds.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil import registry
from profcil.contract.case import ContractRun, MethodCase
from profcil.contract.stream import record_writes
from profcil.engine.channel import KINDS, Channel, ServerState, When
from profcil.engine.evaluation import evaluation_features
from profcil.engine.executor import Executor
from profcil.engine.loop import compute_round
from profcil.model.net import MODEL
from profcil.protocol.participation import participants
from profcil.runs.models.loading import load_model
from profcil.runs.models.saved_model import save_model

TOLERANCE = 1e-4  # the largest difference by rounding between two ways of computation after two rounds
IDLE = 2  # the position, from 0, at which no client has data


def check_run(case: MethodCase) -> str:
    run = case.finished
    states = [block.tensors for block in run.state.server.blocks.values()]
    states += list(run.state.private.values())
    tensors = [t for state in states for t in state.values() if t.is_floating_point()]
    if not all(bool(torch.isfinite(t).all()) for t in tensors):
        return "the final state of the server or of a client contains NaN or infinity"
    return missing_score(run)


def missing_score(run: ContractRun) -> str:
    """Every task must have a score after the last position."""
    has_scores = bool((run.state.scores.correct[-1] >= 0).all())
    return "" if has_scores else "a task has no score after the last position"


def check_kinds(case: MethodCase) -> str:
    run = case.finished
    used = {block.kind for block in run.state.server.blocks.values()}
    unknown = sorted({*run.method.kinds, *used} - {*KINDS})
    if not unknown:
        return ""
    return f"{', '.join(unknown)}: no such kind; the kinds are {', '.join(KINDS)}"


def check_ledger(case: MethodCase) -> str:
    run = case.finished
    faults = []
    for direction in ("down", "up"):
        for kind in KINDS:
            recorded = run.state.ledger.total(direction=direction, kind=kind)
            used = run.traffic.bytes.get((direction, kind), 0)
            if recorded != used:
                faults.append(f"{direction} {kind}: {recorded} bytes in the ledger, {used} bytes used")
    return "; ".join(faults)


def check_labels(case: MethodCase) -> str:
    run = case.finished
    plan = run.world.plan
    for p in range(plan.positions):
        has_score = (run.state.scores.correct[p] >= 0).tolist()
        is_introduced = [set(task) <= plan.seen(p) for task in plan.tasks]
        if has_score != is_introduced:
            return f"at position {p + 1} the tasks with scores are not the introduced tasks"
    seen = plan.seen(plan.positions - 1)
    faults = []
    for name, block in run.state.server.blocks.items():
        unseen = sorted(set(block.labels) - seen)
        if unseen:
            faults.append(f"block {name} has classes {unseen} that no client has seen")
    return "; ".join(faults)


def check_idle(case: MethodCase) -> str:
    run = case.finished
    for entry in run.state.ledger.entries:
        if entry.client not in run.world.plan.active(entry.position):
            return f"client {entry.client} has no data at position {entry.position + 1}, but a message was recorded"
    # a server that trains does so at every position, so the blocks that it trains are left out
    trained = []
    if run.method.server_gradients:
        trained = [name for name in run.state.server.blocks if name not in MODEL]
    servers = [server.drop(*trained) for server in run.servers]
    unchanged = [same_bits(a, b) for a, b in pairwise(servers)]
    return "" if unchanged[IDLE] else "a position at which no client has data changes the server"


def check_single_client(case: MethodCase) -> str:
    settings: dict[str, Any] = {"clients": 1, "participants": 1, "train.rounds": 1}
    run = case.begin(planned=False, setting="homogeneous", **settings).finish()
    return missing_score(run)


def check_resume(case: MethodCase) -> str:
    run = case.finished
    resumed = case.begin()
    assert run.saved is not None
    resumed.state = run.saved
    resumed.finish()
    if not same_bits(run.state.server, resumed.state.server):
        return "after a resume, the final server state differs"
    if run.state.ledger.entries != resumed.state.ledger.entries:
        return "after a resume, other bytes are sent"
    private = dict(run.state.private.items())
    resumed_private = dict(resumed.state.private.items())
    same_clients = private.keys() == resumed_private.keys()
    if not (same_clients and all(same_tensors(private[c], resumed_private[c]) for c in private)):
        return "after a resume, the private state of a client differs"
    return ""


def check_global_random(case: MethodCase) -> str:
    libraries = case.finished.drawn_from
    return f"random numbers were drawn from the global generator of {libraries}" if libraries else ""


class ReversedExecutor(Executor):
    """Computes the turns in reverse order, under other global random states."""

    def __call__(self, turns: Any, guard: Any) -> Any:
        for set_seed in (torch.manual_seed, np.random.seed, random.seed):
            set_seed(len(turns))
        return super().__call__(dict(reversed(turns.items())), guard)


def check_order(case: MethodCase) -> str:
    run = case.begin()
    run.world.executor.__class__ = ReversedExecutor
    run.finish()
    if same_bits(case.finished.state.server, run.state.server):
        return ""
    return "with another order of clients and other global random states, the final server state differs"


def check_acceleration(case: MethodCase) -> str:
    """By SGD, because Adam turns rounding errors of tiny gradients into whole steps."""
    reference = tensors_of(server_after_two_rounds(case, accelerate="off"))
    accelerated = tensors_of(server_after_two_rounds(case, accelerate="auto"))
    if reference.keys() != accelerated.keys():
        return "with accelerate=off and accelerate=auto, the server has different tensors"
    gaps = []
    for name, tensor in reference.items():
        if tensor.numel():
            difference = tensor.double() - accelerated[name].double()
            gaps.append(float(difference.abs().max()))
    largest = max(gaps)
    return "" if largest < TOLERANCE else f"with accelerate=off and accelerate=auto, clients differ by {largest:.2g}"


def server_after_two_rounds(case: MethodCase, accelerate: str) -> ServerState:
    """The server state after two rounds of the first position."""
    settings: dict[str, Any] = {"train.lr": 0.01, "train.optimiser": "sgd", "participants": 3, "train.batch": 4}
    run = case.begin(accelerate=accelerate, **settings)
    channel = Channel(run.state.ledger, run.world.config.transfer, held=run.state.held)
    for r in range(2):
        when = When("round", 0, r, run.world.config.train.rounds)
        clients = participants(run.world.plan, 0, r)
        run.state.server = compute_round(run.world, run.method, run.state, channel, clients, when)[0]
    return run.state.server


def check_writes(case: MethodCase) -> str:
    """With every value of the settings `*_space`, because the losses may read other tensors for each."""
    fields = dataclasses.fields(case.finished.world.config.params)
    spaces = {}
    for param in fields:
        choices = param.metadata.get("choices")
        if param.name.endswith("_space") and choices:
            spaces[param.name] = choices
    most_choices = max(map(len, spaces.values()), default=1)
    for i in range(most_choices):
        chosen = {name: choices[i % len(choices)] for name, choices in spaces.items()}
        settings = {f"params.{name}": space for name, space in chosen.items()}
        run = case.begin(**settings)
        changed = set[str]()
        record_writes(run.method, changed)
        run.finish()
        if changed:
            where = "".join(f" with {name}={space}" for name, space in chosen.items())
            return f"a client writes to {', '.join(sorted(changed))}{where}, which others read as well; write to a copy"
    return ""


def check_attributes(case: MethodCase) -> str:
    method = case.finished.method
    extra = vars(method).keys() - {"params"}
    if extra:
        return (
            f"the method keeps {', '.join(sorted(extra))} as attributes; "
            "what must survive a call belongs to the server state or a client's private state"
        )
    return "" if method.params == case.finished.world.config.params else "the method changes its settings"


def check_model(case: MethodCase) -> str:
    run = case.finished
    with TemporaryDirectory() as folder:
        save_model(Path(folder), run.world, run.method, run.state.server, {})
        model = load_model(folder)
    examples = run.world.evaluation_examples
    inputs = examples.inputs(torch.arange(len(examples)))
    features = evaluation_features(run.world, run.method, run.state.server)
    with torch.no_grad():
        expected = run.method.scores(run.world.net, run.state.server, features)
    seen = list(model.seen)
    if torch.allclose(model.scores(*inputs)[:, seen], expected[:, seen], rtol=TOLERANCE, atol=TOLERANCE):
        return ""
    return "the saved model has other scores; let `deployed` keep every block that `views` and `scores` read"


def check_params(name: str) -> str:
    params: Any = registry.find("methods", name).METHOD.Params
    if not dataclasses.is_dataclass(params) or not vars(params)["__dataclass_params__"].frozen:
        return "Params is not a frozen dataclass"
    no_help = [f.name for f in dataclasses.fields(params) if not f.metadata.get("help")]
    no_default = [f.name for f in dataclasses.fields(params) if f.default is dataclasses.MISSING]
    faults = []
    for names, what in ((no_help, "no help text"), (no_default, "no default")):
        if names:
            faults.append(f"{', '.join(names)}: {what}, use profcil.config.setting")
    return "; ".join(faults)


SETTINGS = "its settings are frozen, and each has a default and a help text"
RUNS = "runs a stream with idle clients, single examples and returning classes, and sends only the kinds it declares"
PROMISES: Mapping[str, Callable[[MethodCase], str]] = {
    RUNS: check_run,
    "declares only kinds that exist": check_kinds,
    "every byte that it sends or receives is in the ledger": check_ledger,
    "labels are sets of class ids, in any order": check_labels,
    "an idle client is sent nothing, and an idle position changes nothing": check_idle,
    "runs with a single client": check_single_client,
    "a resumed run is bit-identical": check_resume,
    "does not use the global random states": check_global_random,
    "is bit-identical for any order of clients and any global random state": check_order,
    "accelerated computation gives the result of the reference, up to rounding": check_acceleration,
    "a client does not write to what it was given": check_writes,
    "has no attributes but its settings": check_attributes,
    "its saved model predicts as the run did": check_model,
}


def tensors_of(server: ServerState) -> dict[str, Tensor]:
    """All tensors of a server state, by block and name."""
    tensors = {}
    for name, block in server.blocks.items():
        for key, tensor in block.tensors.items():
            tensors[f"{name}/{key}"] = tensor
    return tensors


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are bit-identical."""
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[name], b[name]) for name in a)


def same_bits(a: ServerState, b: ServerState) -> bool:
    """Whether two server states are bit-identical, with the same kinds and labels."""
    return block_facts(a) == block_facts(b) and same_tensors(tensors_of(a), tensors_of(b))


def block_facts(server: ServerState) -> dict[str, Any]:
    """The kind and the labels of every block."""
    return {name: (block.kind, block.labels) for name, block in server.blocks.items()}
