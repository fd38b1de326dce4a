"""Training steps at the paper's scale: replayed CUDA graphs against the reference, one eager step after another.

The data are random images of CIFAR-100's shape, which does not change the cost. Each case is the first phase of all
participants of a round: FedAvg's supervised step, PRO-MAX's plastic step (supervised and two contrastive views), the
warm-up step, and PRO-MAX's rehearsal on features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from profcil import registry
from profcil.accel.cuda_graphs.recorder import WIDTH
from profcil.accel.cuda_graphs.runner import GraphRunner
from profcil.accel.cuda_graphs.static_steps import UNROLL_AFTER, BaseStep
from profcil.data.bundle import Bundle, Rows
from profcil.engine import steps
from profcil.engine.channel import Channel, When
from profcil.engine.machine import peak_memory_mb
from profcil.engine.phases import Train
from profcil.engine.warmup import BLOCKS, Warmup, WarmupParams
from profcil.engine.world import World, build_world
from profcil.metrics.ledger import Ledger
from profcil.model.net import MODEL
from profcil.protocol.plan_making import make_plan
from profcil.resolve import resolve

FLOPS = 3 * 2 * 556_651_520  # per image: ResNet-18 forward, and twice as many backward
STEPS = 80  # per client, at least
KINDS = {
    "supervised step": ("fedavg", When("round", 0, 0, 20)),
    "plastic step": ("promax", When("round", 0, 0, 20)),
    "rehearsal step": ("promax", When("round", 0, 2, 20)),
    "warm-up step": ("fedavg", When("warmup", 0, 0, 20)),
}
VIEWS_PER_EXAMPLE = {"supervised step": 1, "plastic step": 3, "warm-up step": 2}


def random_images(n: int = 50_000) -> Bundle:
    """Random images with the facts and sizes of CIFAR-100."""
    facts = registry.find("data", "cifar100").FACTS
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=rng)
    y = torch.arange(n) % facts.classes
    train = Rows(x, y)
    test = Rows(x[:100], y[:100])
    channels = (0.5,) * 3
    names = ("",) * facts.classes
    return Bundle(facts, train, test, None, names, mean=channels, std=channels)


def world_for(method: str, device: str) -> World:
    """A homogeneous stream on the random images."""
    config = resolve("cifar100", {"method": method, "device": device, "setting": "homogeneous"})
    bundle = random_images()
    labels = bundle.train.y.numpy()
    plan = make_plan(labels, bundle.facts.classes, config.stream, config.seed)
    return build_world(config, bundle, plan)


def phases_of(world: World, method: Any, when: When, clients: int = 10) -> list[Train]:
    """The first phase of every participant of a round."""
    blocks = BLOCKS if when.stage == "warmup" else MODEL
    server = method.begin(world.net.weights(blocks))
    channel = Channel(Ledger(), "changed")
    names = method.broadcast(server, when)
    phases = []
    for c in range(clients):
        client = world.client(c, when)
        inbox = channel.down(c, server, names, when)
        phases.append(next(method.turn(client, inbox)))
    return phases


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the second call; the first one compiles kernels and records CUDA graphs."""
    run()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def matmul_peak(device: torch.device) -> float:
    """Operations per second of a large bfloat16 matrix product."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    seconds = seconds_of(lambda: [a @ a for _ in range(20)], device)
    return 20 * 2 * 8192**3 / seconds


def record_multiple_steps(graphs: GraphRunner) -> None:
    """Make the runner record several steps as one graph, as it does late in a stream."""
    for step in graphs.known.values():
        if isinstance(step, BaseStep):
            widths = range(1, WIDTH + 1)
            step.steps_taken.update(dict.fromkeys(widths, UNROLL_AFTER))


def measured(name: str, world: World, phases: Sequence[Train]) -> dict[str, Any]:
    """A row of the table: the replayed and the eager time of a client's step, and images per second."""
    assert world.executor.acceleration is not None
    graphs = world.executor.acceleration.graphs
    assert graphs is not None
    first = phases[0]
    steps_per_epoch = ceil(first.source.size / first.settings.batch)
    epochs = ceil(STEPS / steps_per_epoch)
    short = [replace(p, epochs=epochs) for p in phases]
    torch.cuda.reset_peak_memory_stats(world.device)
    number = sum(result.steps for result in graphs.run(short))
    record_multiple_steps(graphs)
    seconds = seconds_of(lambda: graphs.run(short), world.device)
    memory = peak_memory_mb(world)
    one = replace(short[0], epochs=1)
    eager_seconds = seconds_of(lambda: steps.run(world.net, one), world.device)
    eager = eager_seconds / steps.run(world.net, one).steps
    row: dict[str, Any] = {"ours": 1e3 * seconds / number, "unit": "ms a client's step", "clients": len(short)}
    row |= {"reference": 1e3 * eager, "against": "one step after another, as written", "peak_memory_mb": memory}
    if name in VIEWS_PER_EXAMPLE:
        images = VIEWS_PER_EXAMPLE[name] * first.settings.batch * number / seconds
        share = images * FLOPS / matmul_peak(world.device)
        row |= {"images_per_second": images, "share_of_matmul_peak": share}
    return row


def case(name: str, device: str = "cuda", clients: int = 10) -> dict[str, Any]:
    """One kind of step on one GPU, for a number of clients."""
    method, when = KINDS[name]
    world = world_for(method, device)
    module = registry.find("methods", method)
    instance = module.METHOD(world.config.params)
    if when.stage == "warmup":
        instance = Warmup(WarmupParams())
    phases = phases_of(world, instance, when, clients)
    return measured(name, world, phases)
