"""Training steps at the paper's scale on made images: replayed as the engine does it, against one by one as written.

The data are random images of CIFAR-100's shape, which cost what real ones do. Each case is a round's first phases of
all participants: FedAvg's supervised step, PRO-MAX's plastic step (supervised and both contrastive views), the
warm-up's step, and PRO-MAX's rehearsal on features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from profcil import registry
from profcil.accel.graphs.recorder import WIDTH
from profcil.accel.graphs.runner import Graphs
from profcil.accel.graphs.static_steps import PAYS, OnNets
from profcil.data.bundle import Bundle, Rows
from profcil.engine import steps
from profcil.engine.channel import Door, When
from profcil.engine.phases import Train
from profcil.engine.run import peak_memory_mb
from profcil.engine.warmup import BLOCKS, Warmup, WarmupParams
from profcil.engine.world import World, furnish
from profcil.metrics.ledger import Ledger
from profcil.model.net import MODEL
from profcil.protocol.plan import make_plan
from profcil.resolve import resolve

FLOPS = 3 * 2 * 556_651_520  # of an image: ResNet-18's multiplications forward, and twice as many back
STEPS = 80  # of each client, at least
KINDS = {
    "supervised step": ("fedavg", When("round", 0, 0, 20)),
    "plastic step": ("promax", When("round", 0, 0, 20)),
    "rehearsal step": ("promax", When("round", 0, 2, 20)),
    "warm-up step": ("fedavg", When("warmup", 0, 0, 20)),
}
VIEWS = {"supervised step": 1, "plastic step": 3, "warm-up step": 2}


def made_images(n: int = 50_000) -> Bundle:
    """Random images under CIFAR-100's name, facts and sizes."""
    facts, rng = registry.find("data", "cifar100").FACTS, torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=rng)
    rows = Rows(x, torch.arange(n) % facts.classes)
    channels = (0.5,) * 3
    return Bundle(facts, rows, Rows(x[:100], rows.y[:100]), None, ("",) * facts.classes, mean=channels, std=channels)


def world_for(method: str, device: str) -> World:
    config, bundle = resolve("cifar100", {"method": method, "device": device, "setting": "homogeneous"}), made_images()
    return furnish(config, bundle, make_plan(bundle.train.y.numpy(), bundle.facts.classes, config.stream, config.seed))


def phases_of(world: World, method: Any, when: When, clients: int = 10) -> list[Train]:
    """What a round's participants ask for first."""
    server = method.begin(world.net.weights(BLOCKS if when.stage == "warmup" else MODEL))
    door = Door(Ledger(), "changed")
    names = method.broadcast(server, when)
    return [next(method.turn(world.client(c, when), door.down(c, server, names, when))) for c in range(clients)]


def timed(run: Callable[[], Any], device: torch.device) -> float:
    run()  # recording, compiling, choosing
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def matmul_peak(device: torch.device) -> float:
    """Operations a second of a large bfloat16 product."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    return 20 * 2 * 8192**3 / timed(lambda: [a @ a for _ in range(20)], device)


def ripen(graphs: Graphs) -> None:
    """As late in a stream, when several steps are recorded as one."""
    for step in graphs.known.values():
        if isinstance(step, OnNets):
            step.taken.update(dict.fromkeys(range(1, WIDTH + 1), PAYS))


def measured(name: str, world: World, phases: Sequence[Train]) -> dict[str, Any]:
    """A row of the table: replayed and eager time of a client's step, and what that means in images."""
    assert world.executor.acceleration is not None
    graphs = world.executor.acceleration.graphs
    assert graphs is not None
    epochs = -(-STEPS // -(-phases[0].source.size // phases[0].settings.batch))
    short = [replace(p, epochs=epochs) for p in phases]
    torch.cuda.reset_peak_memory_stats(world.device)
    number = sum(r.steps for r in graphs.run(short))
    ripen(graphs)
    seconds = timed(lambda: graphs.run(short), world.device)
    memory = peak_memory_mb(world)
    one = replace(short[0], epochs=1)
    eager = timed(lambda: steps.run(world.net, one), world.device) / steps.run(world.net, one).steps
    row: dict[str, Any] = {"ours": 1e3 * seconds / number, "unit": "ms a client's step", "clients": len(short)}
    row |= {"reference": 1e3 * eager, "against": "one step after another, as written", "peak_memory_mb": memory}
    if name in VIEWS:
        images = VIEWS[name] * short[0].settings.batch * number / seconds
        row |= {"images_per_second": images, "share_of_matmul_peak": images * FLOPS / matmul_peak(world.device)}
    return row


def case(name: str, device: str = "cuda", clients: int = 10) -> dict[str, Any]:
    """One kind of step on one GPU, for so many clients."""
    method, when = KINDS[name]
    world = world_for(method, device)
    made = registry.find("methods", method).METHOD(world.config.params)
    asked = made if when.stage == "round" else Warmup(WarmupParams())
    return measured(name, world, phases_of(world, asked, when, clients))
