"""What a run happens in: data, plan, model skeleton and device; and clients made from them on demand."""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from profcil import registry
from profcil.data.bundle import Bundle, Examples
from profcil.data.loading import load_bundle
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.executor import Executor, prepare
from profcil.engine.fleet import Fleet, Here
from profcil.engine.server import Server
from profcil.errors import ConfigError, NotApplicable
from profcil.model.net import Net
from profcil.protocol.plan import Plan, make_plan
from profcil.protocol.weak_task import weakened
from profcil.randomness import generator, torch_generator
from profcil.resolve import RunConfig
from profcil.tensors import to_device

SHARES = 64  # clients whose local graphs are kept at hand
HELD_OUT = 0.1  # of each class, where a dataset has no validation part of its own
MOST = 1024  # threads or workers; beyond that it is a slip of the pen, and memory runs out


@dataclass
class World:
    config: RunConfig
    bundle: Bundle
    plan: Plan
    net: Net
    executor: Executor
    labels: Tensor  # of the training examples, on the CPU
    weak_epochs: float = 1.0  # share of the local epochs in turns on the weakened task, where there is one
    features: dict[Any, Tensor] = field(default_factory=dict)  # of clients, by base version; one position long
    kept: tuple[Any, dict[Any, Any]] = (None, {})  # what clients work out once a position, and which position that is
    shares: OrderedDict[int, tuple[Tensor, Examples]] = field(default_factory=OrderedDict)
    fleet: Fleet = field(default_factory=Here)  # where the clients are

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    @property
    def judged(self) -> Examples:
        """The examples that scores are measured on."""
        part = self.bundle.test if self.config.evaluate == "test" else self.bundle.validation
        assert part is not None
        return part

    def client(self, id: int, when: When, private: dict[str, Tensor] | None = None) -> Client:
        """A client at one moment. In the warm-up all it owns is current, and its labels are of no use to it."""
        owned, examples = self.share(id)
        warm, kept = when.stage == "warmup", self.kept_at(when)
        if (id, "current") not in kept:
            ids = torch.from_numpy(self.plan.clean.owned(id) if warm else self.plan.samples(id, when.position).copy())
            kept[id, "current"] = examples.rows(owned if warm else to_device(ids, self.device), owned)
            kept[id, "y_list"] = self.labels[ids].tolist()
        return Client(
            id=id,
            when=when,
            seed=self.config.seed,
            examples=examples,
            current=kept[id, "current"],
            seen=() if warm else tuple(sorted(self.plan.seen(when.position))),
            net=self.net,
            settings=self.config.train,
            budget=1.0 if warm else self.budget(id, when.position),
            private=private,
            cache=self.features,
            kept=kept,
        )

    def kept_at(self, when: When) -> dict[Any, Any]:
        """What clients have worked out at this position; what was worked out at another is dropped."""
        moment = (when.stage == "warmup", when.position)
        if self.kept[0] != moment:
            self.kept = (moment, {})
        return self.kept[1]

    def server(self, when: When) -> Server:
        """The server at one moment."""
        seen = tuple(sorted(self.plan.seen(when.position)))
        like = self.bundle.train.inputs(self.bundle.train.y[:0])
        return Server(when, self.config.seed, seen, self.net, like, self.executor.repeated)

    def budget(self, id: int, position: int) -> float:
        """The share of the local epochs that a client has at a position."""
        return self.weak_epochs if self.plan.orders[id, position] == self.config.stream.weak_task else 1.0

    def share(self, id: int) -> tuple[Tensor, Examples]:
        """What a client owns over the whole stream, and the examples it computes on."""
        if id not in self.shares:
            owned = to_device(torch.from_numpy(self.plan.clean.owned(id).copy()), self.device)
            self.shares[id] = (owned, self.bundle.train.local(owned))
            if len(self.shares) > SHARES:
                self.shares.popitem(last=False)
        return self.shares[id]

    def forget_features(self, keep: int | None = None) -> None:
        """Drops cached features of every base version but one."""
        self.features = {k: v for k, v in self.features.items() if k[1] == keep}


def make_world(config: RunConfig, data_dir: Path) -> World:
    """Loads the data, draws the plan, builds the model; every mistake a user can make shows here, before training."""
    if config.accelerate == "auto":
        prepare(device_of(config.device).type)
    bundle = held_out(load_bundle(config.dataset, data_dir, config.seed), config)
    labels = bundle.train.y.numpy()
    clean = make_plan(labels, bundle.facts.classes, config.stream, config.seed)
    weak = weakened(clean, labels, config.stream)
    return furnish(config, bundle, weak.plan, weak.epochs_factor)


def furnish(config: RunConfig, bundle: Bundle, plan: Plan, weak_epochs: float = 1.0) -> World:
    """The world around some data and a plan: device and threads, model, executor."""
    method = registry.find("methods", config.method).METHOD(config.params)
    workers = set_threads(config, bundle)
    labels = bundle.train.y
    bundle = bundle.to(device_of(config.device))
    net = make_net(config, bundle)
    if reason := method.misfit(net):
        raise NotApplicable(f"not applicable: {reason}")
    method.attach(net, bundle.train.inputs(bundle.train.y[:0]), torch_generator(config.seed, "model", config.method))
    executor = Executor(net, config.accelerate, workers, config.model.precision)
    return World(config, bundle, plan, net, executor, labels, weak_epochs)


def make_net(config: RunConfig, bundle: Bundle) -> Net:
    """The model with the initial weights that seed and encoder determine."""
    m = config.model
    rng = torch_generator(config.seed, "model")
    name = m.encoder or bundle.facts.encoder
    base = checked_base(name, registry.find("encoders", name).build, bundle, norm=m.norm, width=m.width, generator=rng)
    net = Net(
        base,
        bundle.facts,
        bottleneck=m.bottleneck,
        head=m.head,
        augment=config.train.augment,
        vocabulary=bundle.vocabulary,
        generator=rng,
    )
    return net.to(bundle.train.y.device)


def checked_base(name: str, build: Callable[..., Any], bundle: Bundle, **given: Any) -> nn.Module:
    """What an encoder's `build` makes, where that keeps to the contract; else a sentence on what it lacks."""
    try:
        inspect.signature(build).bind(bundle, **given)
    except TypeError as error:
        wanted = 'build(bundle, *, generator, norm="batch", width=0)'
        raise ConfigError(f"the {name} encoder's build cannot be called ({error}); it must be {wanted}") from None
    drawn = torch.get_rng_state()
    base = build(bundle, **given)
    if wrong := unfit(base, torch.equal(drawn, torch.get_rng_state())):
        raise ConfigError(f"the {name} encoder {wrong}")
    return base


def unfit(base: Any, addressed: bool) -> str:
    """What is wrong with a base encoder, as the end of a sentence; empty where nothing is."""
    if not isinstance(base, nn.Module):
        return f"builds {type(base).__name__} where a torch module is expected"
    features = getattr(base, "features", None)
    if not isinstance(features, int) or features < 1:
        return f"has {features!r} as `features`; it must be the number of columns that its forward gives"
    if whole := [k for k, v in base.state_dict().items() if not v.is_floating_point()]:
        return f"keeps {whole[0]}, which cannot be averaged; use profcil.model.layers.BatchNorm and floats only"
    drawing = "draws its weights from torch's global generator; make it with profcil.model.layers.drawn(..., generator)"
    return "" if addressed else drawing


def held_out(bundle: Bundle, config: RunConfig) -> Bundle:
    """For validation runs: the dataset's own validation part, or a tenth of each training class set aside."""
    if config.evaluate == "test" or bundle.validation is not None:
        return bundle
    y = bundle.train.y
    away = torch.zeros(len(y), dtype=torch.bool)
    for label in torch.unique(y).tolist():
        ids = torch.nonzero(y == label).flatten()
        order = torch.from_numpy(generator(config.seed, "validation", label).permutation(len(ids)))
        away[ids[order[: max(1, int(len(ids) * HELD_OUT))]]] = True
    validation, train = (bundle.train.part(torch.nonzero(mask).flatten()) for mask in (away, ~away))
    return replace(bundle, train=train, validation=validation)


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device '{name}'; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is not one that runs are computed on; use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was asked for, but this machine has no usable CUDA GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device '{name}' was asked for, but this machine has {count} of them; use cuda or cuda:0")
    return device


def set_threads(config: RunConfig, bundle: Bundle) -> int:
    """Sets torch's threads and gives the number of workers. Where steps are small, a second thread within a step
    costs more than it brings, and much more on a busy machine: there cores serve different clients instead."""
    for name, given in (("threads", config.threads), ("workers", config.workers)):
        if given > MOST:
            raise ConfigError(f"{name} is {given}, allowed is at most {MOST}; give 0 for what suits this machine")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    x = bundle.train.inputs(torch.zeros(1, dtype=torch.long))[0]
    large = x.dtype == torch.uint8 and x[0].numel() >= 3 * 32 * 32
    torch.set_num_threads(config.threads or (cores if large else 1))
    workers = config.workers or (1 if large or torch.get_num_threads() > 1 else cores)
    return min(workers, config.stream.participants)  # each has a model of its own, and more have nothing to do
