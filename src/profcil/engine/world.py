"""Everything that a run computes with: data, plan, model and device. Creates clients from them on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profcil import registry
from profcil.config import OWN
from profcil.data.bundle import Bundle, Examples
from profcil.data.loading import load_bundle
from profcil.engine.build import held_out, make_net
from profcil.engine.channel import When
from profcil.engine.client import Client, FeatureKey
from profcil.engine.device import device_of, set_threads
from profcil.engine.executor import Executor, prepare
from profcil.engine.fleet import Fleet, LocalFleet
from profcil.engine.server import Server
from profcil.errors import DataError, NotApplicable
from profcil.model.net import Net
from profcil.protocol.plan import Plan, make_plan
from profcil.protocol.weak_task import weakened
from profcil.randomness import torch_generator
from profcil.resolve import RunConfig
from profcil.tensors import to_device

CACHED_CLIENTS = 64  # clients whose local examples (for graphs, their subgraphs) stay in memory


@dataclass
class World:
    config: RunConfig
    bundle: Bundle
    plan: Plan
    net: Net
    executor: Executor
    labels: Tensor  # of the training examples, on the CPU
    weak_epochs: float = 1.0  # share of the local epochs in turns on the weakened task, if there is one
    features: dict[FeatureKey, Tensor] = field(default_factory=dict)  # of clients; emptied at each position
    kept: tuple[Any, dict[Any, Any]] = (None, {})  # a position, and what clients computed once in it
    shares: OrderedDict[int, tuple[Tensor, Examples]] = field(default_factory=OrderedDict)
    fleet: Fleet = field(default_factory=LocalFleet)  # computes the clients' turns

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def evaluation_examples(self) -> Examples:
        """The examples that scores are measured on."""
        part = self.bundle.test if self.config.evaluate == "test" else self.bundle.validation
        assert part is not None
        return part

    def client(self, id: int, when: When, private: dict[str, Tensor] | None = None) -> Client:
        """A client at one moment. Before the stream all its examples are current, and no class counts as seen."""
        _, examples = self.share(id)
        kept = self.kept_at(when)
        if (id, "current") not in kept:
            self.store_current(id, when)
        seen: tuple[int, ...] = ()
        budget = 1.0
        if not when.before_stream:
            seen = tuple(sorted(self.plan.seen(when.position)))
            budget = self.budget(id, when.position)
        return Client(
            id=id,
            when=when,
            seed=self.config.seed,
            examples=examples,
            current=kept[id, "current"],
            seen=seen,
            net=self.net,
            settings=self.config.train,
            budget=budget,
            private=private,
            cache=self.features,
            kept=kept,
        )

    def store_current(self, id: int, when: When) -> None:
        """Computes the rows of a client's current examples and their labels as Python integers, for this position."""
        owned, examples = self.share(id)
        if when.before_stream:
            ids = torch.from_numpy(self.plan.clean.owned(id))
            current = owned
        else:
            ids = torch.from_numpy(self.plan.samples(id, when.position).copy())
            current = to_device(ids, self.device)
        kept = self.kept_at(when)
        kept[id, "current"] = examples.rows(current, owned)
        kept[id, "y_list"] = self.labels[ids].tolist()

    def kept_at(self, when: When) -> dict[Any, Any]:
        """What clients have computed at this position. Results of another position are dropped."""
        moment = (when.before_stream, when.position)
        if self.kept[0] != moment:
            self.kept = (moment, {})
        return self.kept[1]

    def server(self, when: When) -> Server:
        """The server at one moment."""
        seen = tuple(sorted(self.plan.seen(when.position)))
        no_inputs = self.bundle.train.inputs(self.bundle.train.y[:0])
        return Server(when, self.config.seed, seen, self.net, no_inputs, self.executor.repeated)

    def budget(self, id: int, position: int) -> float:
        """The share of the local epochs that a client has at a position."""
        is_weak = self.plan.orders[id, position] == self.config.stream.weak_task
        return self.weak_epochs if is_weak else 1.0

    def share(self, id: int) -> tuple[Tensor, Examples]:
        """The ids of all examples of a client over the whole stream, and the examples it computes on."""
        if id not in self.shares:
            ids = torch.from_numpy(self.plan.clean.owned(id).copy())
            owned = to_device(ids, self.device)
            self.shares[id] = (owned, self.bundle.train.local(owned))
            if len(self.shares) > CACHED_CLIENTS:
                self.shares.popitem(last=False)
        return self.shares[id]

    def forget_features(self, versions: Collection[int] = ()) -> None:
        """Drops cached features of clients, except those under blocks of these versions."""
        kept = {}
        for key, features in self.features.items():
            _, _, version = key
            if version in versions:
                kept[key] = features
        self.features = kept


def make_world(config: RunConfig, data_dir: Path) -> World:
    """Loads the data, draws the plan and builds the model. Mistakes in the settings raise errors here, before any
    training."""
    if config.accelerate == "auto":
        prepare(device_of(config.device).type)
    bundle = load_data(config, data_dir)
    weak = weakened(draw_plan(config, bundle), bundle.train.y.numpy(), config.stream)
    return build_world(config, bundle, weak.plan, weak.epochs_factor)


def load_data(config: RunConfig, data_dir: Path) -> Bundle:
    """The data of a run, with a validation part if the run is evaluated on one."""
    more = (config.own,) if config.dataset == OWN else ()
    bundle = held_out(load_bundle(config.dataset, data_dir, config.seed, *more), config)
    clients = config.stream.clients
    if config.dataset == OWN and len(bundle.train) < clients:
        raise DataError(
            f"{data_dir} has {len(bundle.train)} training examples for {clients} clients; give more examples, or fewer "
            "clients with --set clients=N"
        )
    return bundle


def draw_plan(config: RunConfig, bundle: Bundle) -> Plan:
    """The stream of a run: tasks as the data gives them, or drawn with the seed."""
    given = (bundle.tasks,) if bundle.tasks else ()
    return make_plan(bundle.train.y.numpy(), bundle.facts.classes, config.stream, config.seed, *given)


def build_world(config: RunConfig, bundle: Bundle, plan: Plan, weak_epochs: float = 1.0) -> World:
    """The world for given data and a plan: sets the threads, moves the data to the device, builds model and
    executor."""
    method = registry.find("methods", config.method).METHOD(config.params)
    workers = set_threads(config, bundle)
    labels = bundle.train.y
    bundle = bundle.to(device_of(config.device))
    net = make_net(config, bundle)
    if reason := method.misfit(net):
        raise NotApplicable(f"not applicable: {reason}")
    no_inputs = bundle.train.inputs(bundle.train.y[:0])
    method.attach(net, no_inputs, torch_generator(config.seed, "model", registry.short_name(config.method)))
    executor = Executor(net, config.accelerate, workers, config.model.precision)
    return World(config, bundle, plan, net, executor, labels, weak_epochs)
