"""A method on the contract's stream: tiny runs of it on one modality, which the promises are checked on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from profcil import registry
from profcil.contract.stream import (
    BUNDLES,
    DATASET,
    CountedTraffic,
    contract_plan,
    record_traffic,
    short_server_training,
)
from profcil.engine.channel import ServerState, When
from profcil.engine.dictionary import compute as compute_dictionary
from profcil.engine.dictionary import prepare_dictionary
from profcil.engine.evaluation import task_totals
from profcil.engine.loop import stream
from profcil.engine.run_state import RunState
from profcil.engine.world import World, build_world
from profcil.errors import NotApplicable
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL
from profcil.protocol.plan_making import make_plan
from profcil.resolve import recipe_of, resolve
from profcil.runs.folder import RunFolder

TINY = {"warmup.rounds": 0, "train.rounds": 3, "train.epochs": 1, "train.batch": 8, "model.width": 4, "workers": 1}
STREAM = {"clients": 3, "participants": 2, "task_size": 2}


@dataclass
class ContractRun:
    """A run in memory, with the server states before the stream and after every position."""

    world: World
    method: Any
    state: RunState
    servers: list[ServerState] = field(default_factory=list)
    traffic: CountedTraffic = field(default_factory=CountedTraffic)
    saved: RunState | None = None  # saved and loaded again in the middle of the second position
    drawn_from: str = ""  # the libraries whose global random state changed

    def finish(self, folder: Path | None = None) -> ContractRun:
        """Run the whole stream. With a folder, save and load the state in the middle of the second position."""
        self.servers.append(self.state.server)

        def watch(what: str, when: When, facts: dict[str, Any]) -> None:
            if what == "position":
                self.servers.append(self.state.server)
            if folder and (what, when.position, when.round) == ("round", 1, 1):
                with RunFolder(folder) as run_folder:
                    run_folder.save(self.state, "", {})
                    self.saved = run_folder.load(torch.device("cpu"))[0]

        stream(self.world, self.method, self.state, watch)
        return self


@dataclass
class MethodCase:
    """A method on one modality, with some settings of its own. Its reference run is made once."""

    name: str
    modality: str
    reference: ContractRun | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def begin(self, planned: bool = True, setting: str = "severe", **settings: Any) -> ContractRun:
        """A new run that has not started, with a normalisation that the method accepts."""
        flags = {"method": self.name, "dataset": DATASET[self.modality], "setting": setting}
        brief = {f"params.{key}": value for key, value in short_server_training(self.name).items()}
        plain = without_recipe(self.name, flags["dataset"])
        wanted = {**TINY, **STREAM, **plain, **brief, **self.settings, **settings}
        try:
            return build_run(resolve(None, flags, wanted), self.modality, planned)
        except NotApplicable:
            return build_run(resolve(None, flags, wanted | {"model.norm": "batch"}), self.modality, planned)

    @property
    def finished(self) -> ContractRun:
        """The finished reference run."""
        if self.reference is None:
            run = self.begin()
            record_traffic(run.method, run.traffic)
            with TemporaryDirectory() as folder:
                before = random_states()
                run.finish(Path(folder) / "run")
                changed = [library for library, state in random_states().items() if state != before[library]]
                run.drawn_from = ", ".join(changed)
            self.reference = run
        return self.reference


def without_recipe(name: str, dataset: str) -> dict[str, Any]:
    """Defaults of a method, in place of the settings that a dataset's recipe has chosen for it."""
    chosen = recipe_of(dataset).get("methods", {}).get(name, {})
    fields = dataclasses.fields(registry.find("methods", name).METHOD.Params)
    return {f"params.{field.name}": field.default for field in fields if field.name in chosen}


def build_run(config: Any, modality: str, planned: bool) -> ContractRun:
    """A run that has not started, on the plan of the contract or on one that is drawn from the settings."""
    bundle = BUNDLES[modality]()
    labels = bundle.train.y.numpy()
    draw_plan = contract_plan if planned else make_plan
    plan = draw_plan(labels, bundle.facts.classes, config.stream, config.seed)
    world = build_world(config, bundle, plan)
    method = registry.find("methods", config.method).METHOD(config.params)
    dictionary = prepare_dictionary(world, method, lambda *_: None, compute_dictionary)
    with torch.no_grad():
        server = method.begin(dictionary.added_to(world.net.weights((*MODEL, *world.net.attached))))
    scores = Scores.empty(world.plan.positions, task_totals(world))
    return ContractRun(world, method, RunState(server, scores, Ledger()))


def random_states() -> dict[str, Any]:
    """The global random states, by library."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    numpy_state: Any = np.random.get_state()
    _, words, position, *_ = numpy_state
    return {
        "torch": torch_state,
        "numpy": (words.tobytes(), position),
        "random": random.getstate(),
    }
