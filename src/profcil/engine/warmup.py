"""The warm-up: federated contrastive learning of the base on unlabelled client data, the same for all methods.

It is written as a method with one position, so that the same code computes and meters its rounds. The base is averaged.
With `warmup.projector = "averaged"` the projector is averaged, too. With `"local"` each client has its own: it is drawn
from the seed in the client's first turn and is part of its private tensors until the warm-up ends. The projector is
discarded afterwards. Labels and tasks are not used. The result is cached under a hash of everything it depends on, so
that all methods and ablations of a study start from the same bits.
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
from typing import Any

import torch
from torch import Tensor

from profcil import __version__, registry
from profcil.config import Checked, setting
from profcil.data.bundle import to_device
from profcil.engine.channel import Channel, Inbox, ServerState, When, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Turn
from profcil.engine.world import World
from profcil.io.atomic_files import read_tensors, write_tensors
from profcil.io.cache_folder import cache_folder, make_private_folder
from profcil.methods.base import Method, reply
from profcil.methods.parts.addends import ModelMean
from profcil.metrics.ledger import Ledger
from profcil.model.losses import consistency
from profcil.model.net import MODEL, Net, Weights
from profcil.plain_values import plain
from profcil.randomness import torch_generator

BLOCKS = ("base", "projector")
OPTIMISER = ("optimiser", "lr", "momentum", "weight_decay", "decay", "clip")  # settings that the warm-up has, too


@dataclass(frozen=True)
class WarmupParams(Checked):
    temperature: float = setting(0.5, "temperature of the contrastive loss", low=1e-3)
    epochs: int = setting(1, "local epochs per warm-up round", low=1)
    projector: str = setting("averaged", "the projector: averaged, or local", choices=("averaged", "local"))


class Warmup(Method):
    """Contrastive federated averaging."""

    Params = WarmupParams
    additive = dict.fromkeys(BLOCKS, ModelMean())

    @property
    def sent(self) -> tuple[str, ...]:
        """The blocks that are broadcast and averaged."""
        return BLOCKS if self.params.projector == "averaged" else ("base",)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return self.sent

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        weights = weights_of(inbox)
        local_projector = "projector" not in self.sent
        if local_projector:
            weights["projector"] = dict(client.private or first_projector(client))
        trained = yield client.train("warmup", weights, BLOCKS, self.loss, epochs=self.params.epochs)
        answer = reply(client, trained.weights, self.sent, loss=trained.loss)
        if local_projector:
            return replace(answer, private=trained.weights["projector"])
        return answer

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return consistency(net, batch["inputs"], batch["rng"], self.params.temperature)


def first_projector(client: Client) -> dict[str, Tensor]:
    """The initial projector of a client, drawn from the seed."""
    rng = torch_generator(client.seed, "warm-up projector", client.id)
    bound = client.net.features**-0.5
    projector = {}
    for name, like in client.net.projector.items():
        drawn = torch.empty(like.shape).uniform_(-bound, bound, generator=rng)
        projector[name] = to_device(drawn, client.current.device)
    return projector


@dataclass(frozen=True)
class WarmupResult:
    """The model after the warm-up, from which every method starts."""

    weights: Weights
    seconds: float  # that computing it took, in this run or in an earlier one
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
    if c.robust.aggregation != "mean":
        facts["aggregation"] = c.robust.aggregation
    if world.protection:
        facts["privacy"] = [plain(c.privacy), world.protection.multiplier, world.protection.clients]
    elif c.privacy.secure_sum:
        facts["privacy"] = plain(c.privacy)
    if from_plugin := registry.origin("encoders", encoder):
        facts["brought"] = from_plugin  # the key is part of the hash
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def warm(world: World, watch: Callable[[str, When, dict[str, Any]], None]) -> WarmupResult:
    """The model after the warm-up, from the cache if it has a readable copy. Otherwise it is computed and cached."""
    if not world.config.warmup.rounds:
        return WarmupResult(model_weights(world), 0.0, False, Ledger())
    path = cache_folder() / "warmup" / f"{cache_key(world)}.safetensors"
    with cache_lock(path):
        cached = read_cache(path, world)
        if cached is not None:
            return cached
        warmed = compute(world, watch)
        facts = {"seconds": warmed.seconds, "ledger": warmed.ledger.to_csv()}
        with suppress(OSError):  # without a cache file a later run computes the warm-up again
            write_tensors(path, warmed.weights["base"], facts)
        return warmed


def model_weights(world: World) -> Weights:
    """The current weights of the model, with the blocks that the method has attached."""
    return world.net.weights((*MODEL, *world.net.attached))


def read_cache(path: Path, world: World) -> WarmupResult | None:
    """The cached warm-up; None if the file is missing, damaged or of another model."""
    found = read_tensors(path)
    if found is None or not alike(found[0], world.net.base.state_dict()):
        return None
    base, facts = found
    weights = model_weights(world)
    weights["base"] = {name: tensor.to(world.device) for name, tensor in base.items()}
    return WarmupResult(weights, facts["seconds"], True, Ledger.from_csv(facts["ledger"]))


def alike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names and shapes."""
    found_shapes = {name: tensor.shape for name, tensor in found.items()}
    wanted_shapes = {name: tensor.shape for name, tensor in wanted.items()}
    return found_shapes == wanted_shapes


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Holds a lock on a cache file, so that of several runs with the same warm-up one computes it and the others wait.
    Without effect on file systems that have no locks."""
    try:
        locks = cache_folder() / "locks"
        make_private_folder(locks)
        lock = open(locks / path.stem, "a")  # noqa: SIM115 - open as long as the lock is held
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def warmup_setup(world: World) -> tuple[World, Warmup]:
    """The world with the warm-up's batch size and optimiser, and the warm-up as a method."""
    settings = world.config.warmup
    optimiser = {name: getattr(settings, name) for name in OPTIMISER}
    train = replace(world.config.train, batch=settings.batch, **optimiser)
    method = Warmup(WarmupParams(settings.temperature, settings.epochs, settings.projector))
    return replace(world, config=replace(world.config, train=train)), method


def compute(world: World, watch: Callable[[str, When, dict[str, Any]], None]) -> WarmupResult:
    """Computes the rounds of the warm-up. Adapter and head stay as initialised."""
    from profcil.engine.loop import compute_round
    from profcil.engine.run_state import RunState
    from profcil.metrics.scores import Scores
    from profcil.protocol.participation import warmup_participants

    began = time.perf_counter()
    rounds = world.config.warmup.rounds
    weights = model_weights(world)
    start = weights | world.net.weights(["projector"])
    warmup_world, method = warmup_setup(world)
    server = method.begin({block: start[block] for block in method.sent})
    state = RunState(server, Scores.empty(0, torch.zeros(0).numpy()), Ledger())
    channel = Channel(state.ledger, world.config.transfer, held=state.held)
    for r in range(rounds):
        when = When("warmup", 0, r, rounds)
        clients = warmup_participants(world.plan, r)
        state.server, facts = compute_round(warmup_world, method, state, channel, clients, when)
        watch("warmup", when, facts)
    world.executor.clear_caches()
    weights["base"] = state.server.weights()["base"]
    return WarmupResult(weights, time.perf_counter() - began, False, state.ledger)
