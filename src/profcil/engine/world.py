"""Everything that a run computes with: data, plan, model and device. Creates clients from them on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profcil import registry
from profcil.config import OWN
from profcil.data.bundle import Bundle, Examples, to_device
from profcil.data.loading import load_bundle
from profcil.engine.build import held_out, make_net
from profcil.engine.channel import Inbox, Reply, When
from profcil.engine.client import Client, FeatureKey
from profcil.engine.device import device_of, set_threads
from profcil.engine.executor import Executor, prepare
from profcil.engine.fleet import Fleet, LocalFleet
from profcil.engine.late import check_clock
from profcil.engine.packing import check_channel
from profcil.engine.server import Server
from profcil.engine.summed_replies import check_secure_sums
from profcil.errors import DataError, NotApplicable
from profcil.model.net import Net
from profcil.privacy.plan import make_protection
from profcil.privacy.protection import Protection
from profcil.protocol.plan import Plan
from profcil.protocol.plan_making import make_plan
from profcil.protocol.weak_task import weakened
from profcil.randomness import torch_generator
from profcil.resolve import RunConfig

CACHED_CLIENTS = 64  # clients whose local examples (for graphs, their subgraphs) stay in memory


@dataclass(frozen=True)
class Assignment:
    """What the plan gives a client at a position."""

    current: Tensor  # the rows of its examples that have labels now
    y_list: list[int]  # these labels
    seen: tuple[int, ...] = ()  # Y^(p)
    budget: float = 1.0  # share of the local epochs


# Called with the run's state before a position. Clients that join and classes that are declared change the plan.
# Returns what changed, for the log.
Growth = Callable[["World", Any], dict[str, Any]]


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
    growth: Growth | None = None
    protection: Protection | None = None  # noise on replies, if there is any
    secret: int | None = None  # from which the noise is drawn; None = the run's seed
    withheld: frozenset[int] | None = None  # classes that are rare in the secure sum being made; None = not known

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def counts_first(self) -> bool:
        """Whether clients add their counts before their statistics. With noise the noised counts are used."""
        return self.config.privacy.sum_support and self.protection is None

    @property
    def evaluation_examples(self) -> Examples:
        """The examples that scores are measured on."""
        part = self.bundle.test if self.config.evaluate == "test" else self.bundle.validation
        assert part is not None
        return part

    def observed(self, client: int, position: int) -> tuple[int, ...]:
        """The classes that a client has at a position, as the plan says, which may grow."""
        return self.plan.observed(client, position)

    def current_classes(self, when: When) -> list[int]:
        """The classes that any client may have at a position, for the rows of a secure sum. None before the stream."""
        return [] if when.before_stream else sorted(self.plan.current(when.position))

    def client(self, id: int, when: When, private: dict[str, Tensor] | None = None) -> Client:
        """A client at one moment."""
        _, examples = self.share(id)
        kept = self.kept_at(when)
        if (id, "assignment") not in kept:
            kept[id, "assignment"] = self.assign(id, when)
        given: Assignment = kept[id, "assignment"]
        kept[id, "y_list"] = given.y_list
        return Client(
            id=id,
            when=when,
            seed=self.config.seed,
            examples=examples,
            current=given.current,
            seen=given.seen,
            net=self.net,
            settings=self.config.train,
            budget=given.budget,
            private=private,
            cache=self.features,
            kept=kept,
            **self.limits(),
            noise=self.protection.gradient_noise(self.own_secret) if self.protection else None,
            summed=self.config.privacy.secure_sum,
        )

    def limits(self) -> dict[str, Any]:
        """What limits the statistics of a client: the length of its features, and the least examples of a class. Where
        noise hides single examples, a class with few of them is left out by the server, after the noise: which classes
        a client leaves out would reveal an example."""
        settings = self.config.privacy
        if self.protection is None:
            if self.withheld is not None:
                return {"withheld": self.withheld}
            return {"min_support": settings.min_support}
        return {"bound": settings.bound, "min_support": settings.min_support if self.protection.by_client else 1}

    def protected(self, client: Client, inbox: Inbox, reply: Reply) -> Reply:
        """A client's reply as it may leave the client."""
        if self.protection is None:
            return reply
        return self.protection.protect(reply, inbox, client.when, len(client.current), self.own_secret)

    @property
    def own_secret(self) -> int:
        """The number from which the noise is drawn."""
        return self.config.seed if self.secret is None else self.secret

    def assign(self, id: int, when: When) -> Assignment:
        """What the plan gives a client at this position. Before the stream all its examples are current, and no class
        counts as seen."""
        owned, examples = self.share(id)
        if when.before_stream:
            ids = torch.from_numpy(self.plan.clean.owned(id))
            return Assignment(examples.rows(owned, owned), self.labels[ids].tolist())
        ids = torch.from_numpy(self.plan.samples(id, when.position).copy())
        current = to_device(ids, self.device)
        seen = tuple(sorted(self.plan.seen(when.position)))
        is_weak = self.plan.orders[id, when.position] == self.config.stream.weak_task
        budget = self.weak_epochs if is_weak else 1.0
        return Assignment(examples.rows(current, owned), self.labels[ids].tolist(), seen, budget)

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
    if config.path == "auto":
        prepare(device_of(config.device).type)
    bundle = load_data(config, data_dir)
    weak = weakened(draw_plan(config, bundle), bundle.train.y.numpy(), config.stream)
    return build_world(config, bundle, weak.plan, weak.epochs_factor)


def load_data(config: RunConfig, data_dir: Path) -> Bundle:
    """The data of a run, with a validation part if the run is evaluated on one or stops by one."""
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
    check_secure_sums(config, method.additive, summable_methods)
    check_channel(config, method)
    check_clock(config, method)
    workers = set_threads(config, bundle)
    labels = bundle.train.y
    bundle = bundle.to(device_of(config.device))
    net = make_net(config, bundle)
    if reason := method.misfit(net):
        raise NotApplicable(f"not applicable: {reason}")
    no_inputs = bundle.train.inputs(bundle.train.y[:0])
    method.attach(net, no_inputs, torch_generator(config.seed, "model", registry.short_name(config.method)))
    executor = Executor(net, config.path, workers, config.model.precision)
    protection = make_protection(config, method, plan, net, no_inputs)
    return World(config, bundle, plan, net, executor, labels, weak_epochs, protection=protection)


def summable_methods() -> list[str]:
    """The methods whose replies can be summed securely."""
    return [name for name, module in registry.usable("methods").items() if module.METHOD.additive]
