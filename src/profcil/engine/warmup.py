"""The shared start: federated contrastive learning of the base on unlabelled client data, the same for all methods.

Written as a method of one position, so that the same turns, door and meter run it. The base is averaged, and the
projector too (`warmup.projector = "averaged"`), or it stays on its client (`"local"`): then it is drawn from the seed
in the client's first turn and kept as its private memory until the warm-up ends. The projector is thrown away
afterwards. Labels and task identities are never touched. The result is cached under everything it depends on, so that
all methods and ablations of a study start from the same bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from profcil import __version__, registry
from profcil.config import Checked, plain, setting
from profcil.engine.channel import Door, When
from profcil.engine.client import Client
from profcil.engine.payload import Inbox, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.engine.world import World
from profcil.io.atomic_files import read_tensors, write_tensors
from profcil.io.cache_folder import cache_folder
from profcil.methods.base import Method, reply
from profcil.metrics.ledger import Ledger
from profcil.model.losses import consistency
from profcil.model.net import MODEL, Net, Weights
from profcil.randomness import torch_generator
from profcil.tensors import to_device

BLOCKS = ("base", "projector")
OPTIMISER = ("optimiser", "lr", "momentum", "weight_decay", "decay", "clip")  # settings of the warm-up's own


@dataclass(frozen=True)
class WarmupParams(Checked):
    temperature: float = setting(0.5, "temperature of the contrastive loss", low=1e-3)
    epochs: int = setting(1, "local epochs per warm-up round", low=1)
    projector: str = setting("averaged", "the projector: averaged, or local", choices=("averaged", "local"))


class Warmup(Method):
    """Contrastive federated averaging."""

    Params = WarmupParams

    @property
    def sent(self) -> tuple[str, ...]:
        """The blocks that travel."""
        return BLOCKS if self.params.projector == "averaged" else ("base",)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return self.sent

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        weights = weights_of(inbox)
        local = "projector" not in self.sent
        if local:
            weights["projector"] = dict(client.private or first_projector(client))
        done = yield client.train("warmup", weights, BLOCKS, self.loss, epochs=self.params.epochs)
        answer = reply(client, done.weights, self.sent, loss=done.loss)
        return replace(answer, private=done.weights["projector"]) if local else answer

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return consistency(net, batch["inputs"], batch["rng"], self.params.temperature)


def first_projector(client: Client) -> dict[str, Tensor]:
    """A client's own projector before its first turn, drawn from the seed."""
    rng = torch_generator(client.seed, "warm-up projector", client.id)
    bound = client.net.features**-0.5
    shapes = {name: tensor.shape for name, tensor in client.net.projector.items()}
    drawn = {name: torch.empty(shape).uniform_(-bound, bound, generator=rng) for name, shape in shapes.items()}
    return {name: to_device(tensor, client.current.device) for name, tensor in drawn.items()}


@dataclass(frozen=True)
class Warmed:
    """The start of every method's stream."""

    weights: Weights
    seconds: float  # of computing it, whether or not that was now
    cached: bool
    ledger: Ledger


def cache_key(world: World) -> str:
    """A hash of everything the warmed base depends on."""
    c = world.config
    encoder = c.model.encoder or world.bundle.facts.encoder
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "data": world.bundle.fingerprint,
        "plan": world.plan.clean.digest,
        "seed": c.seed,
        "device": world.device.type,
        "encoder": encoder,
        "shapes": {name: list(t.shape) for name, t in world.net.base.state_dict().items()},
        "model": [c.model.norm, c.model.width, bool(world.net.bf16)],
        "warmup": plain(c.warmup),
        "divergence": [c.train.loss_limit, c.train.on_divergence],
        "transfer": c.transfer,
    }
    if world.executor.acceleration is None:  # also with "auto", where the package accel is absent
        facts["accelerate"] = "off"
    if from_plugin := registry.origin("encoders", encoder):
        facts["brought"] = from_plugin  # the key is part of the hash
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def warm(world: World, watch: Callable[[str, When, dict], None]) -> Warmed:
    """The warmed model, from the cache where it is there and readable, else computed and cached."""
    own = (*MODEL, *world.net.attached)
    if not world.config.warmup.rounds:
        return Warmed(world.net.weights(own), 0.0, False, Ledger())
    path = cache_folder() / "warmup" / f"{cache_key(world)}.safetensors"
    with alone_with(path):
        found = read_tensors(path)
        if found is not None and alike(found[0], world.net.base.state_dict()):
            base, facts = found
            weights = {**world.net.weights(own), "base": {k: v.to(world.device) for k, v in base.items()}}
            return Warmed(weights, facts["seconds"], True, Ledger.from_csv(facts["ledger"]))
        warmed = compute(world, watch)
        facts = {"seconds": warmed.seconds, "ledger": warmed.ledger.to_csv()}
        with suppress(OSError):  # a cache that cannot be written costs time later, nothing else
            write_tensors(path, warmed.weights["base"], facts)
        return warmed


def alike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the names and shapes of others."""
    return {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in wanted.items()}


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Runs that start together on one warm-up wait for the one that computes it, where locks can be had."""
    try:
        locks = cache_folder() / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = open(locks / path.stem, "a")  # noqa: SIM115 - held until the warm-up is there
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def player(world: World) -> tuple[World, Warmup]:
    """The world as the warm-up sees it, with batches and an optimiser of its own, and its method."""
    c = world.config.warmup
    train = replace(world.config.train, batch=c.batch, **{name: getattr(c, name) for name in OPTIMISER})
    params = WarmupParams(c.temperature, c.epochs, c.projector)
    return replace(world, config=replace(world.config, train=train)), Warmup(params)


def compute(world: World, watch: Callable[[str, When, dict], None]) -> Warmed:
    """Runs the warm-up rounds; the adapter and head stay as initialised."""
    from profcil.engine.loop import RunState, play
    from profcil.metrics.scores import Scores
    from profcil.protocol.participation import warmup_participants

    c, began = world.config.warmup, time.perf_counter()
    own = (*MODEL, *world.net.attached)
    start = world.net.weights((*own, "projector"))
    inner, method = player(world)
    state = RunState(
        method.begin({b: start[b] for b in method.sent}), Scores.empty(0, torch.zeros(0).numpy()), Ledger()
    )
    door = Door(state.ledger, world.config.transfer, held=state.held)
    for r in range(c.rounds):
        when = When("warmup", 0, r, c.rounds)
        clients = warmup_participants(world.plan, r)
        state.server, facts = play(inner, method, state, door, clients, when)
        watch("warmup", when, facts)
    world.executor.forget()
    weights = {b: start[b] for b in own} | {"base": state.server.weights()["base"]}
    return Warmed(weights, time.perf_counter() - began, False, state.ledger)
