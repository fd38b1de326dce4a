"""How training phases run: the base on its module, client by client; adapters and heads stacked over clients, and on a
CPU small bases, too (`stacks`).

Every step is the same: loss, gradient, proximal pull, clip, update. Shapes are static and nothing is read back from
the device before a phase ends. This is the reference; `graphs` replays the same steps on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from profcil.accel.cpu import adapter_head_epoch
from profcil.accel.cpu.adapter_head_gradient import Classification
from profcil.config import TrainSettings
from profcil.engine.optim import Optimiser, clip_
from profcil.engine.phases import Batch, Train, Trained, cut
from profcil.model.net import MODEL, TAIL, Net, Tail


def run(net: Net, phases: Sequence[Train]) -> list[Trained]:
    """Runs phases of different clients that may be computed together (see `together`)."""
    from profcil.accel.cpu import stacked_clients  # which makes use of what stands here

    if phases[0].on_features:
        gradient = gradient_of(net, phases[0]) if len(phases) == 1 else None
        if gradient is None:
            return run_stacked(net, phases)
        return [adapter_head_epoch.run(phases[0], gradient, generator_of(net, phases[0]))]
    if stacked_clients.fit(net, phases):
        return stacked_clients.run(net, phases)
    return [run_on_net(net, phase) for phase in phases]


def together(phase: Train) -> tuple:
    """Phases with equal keys can be computed together; full batches must have one shape."""
    size = phase.source.size if not phase.settings.batch else 0
    constants = tuple((k, v.shape) for k, v in phase.constants.items())
    alike = (phase.name, phase.blocks, phase.loss, phase.epochs, phase.proximal, phase.settings)
    return (*alike, tuple(phase.weights), constants, size)


def generator_of(net: Net, phase: Train) -> torch.Generator:
    device = next(net.parameters()).device
    return torch.Generator(device=device).manual_seed(phase.seed)


def run_on_net(net: Net, phase: Train) -> Trained:
    """A phase that moves the base: weights are loaded into the module and trained in place."""
    net.load(phase.weights)
    parameters, pulled = unfreeze(net, phase.blocks)
    anchor = [p.detach().clone() for p in pulled] if phase.proximal else None
    optimiser, rng = optimiser_of(phase.settings, parameters), generator_of(net, phase)
    losses: list[Tensor] = []
    for _ in range(phase.epochs):
        rows, losses = phase.source.epoch(rng), []
        for index in cut(phase.source.size, phase.settings.batch, rng):
            batch: Batch = {k: v[index] for k, v in rows.items()} | phase.constants | {"rng": rng}
            if phase.inputs is not None:
                batch["inputs"] = phase.inputs(batch["index"])
            losses.append(step(net, parameters, phase, batch, optimiser, anchor))
    weights = {**phase.weights, **net.weights(phase.blocks)}
    return Trained(weights, float(torch.stack(losses).mean()), optimiser.time)


def unfreeze(net: Net, blocks: Sequence[str]) -> tuple[list[Parameter], list[Parameter]]:
    """Readies the module for training these blocks: the parameters that move, and those among them that a proximal
    term pulls. The pulled ones come first; a throw-away projector is free."""
    net.train()
    net.requires_grad_(False)
    parameters = net.trainable(blocks)
    for p in parameters:
        p.requires_grad_(True)
    return parameters, net.trainable([b for b in blocks if b in MODEL])


def gradient_of(net: Net, phase: Train) -> type[Classification] | None:
    """The phase's gradient where it is written down, and that way is the faster one: on a CPU."""
    fits = phase.blocks == TAIL and not net.cosine and net.twins and next(net.parameters()).device.type == "cpu"
    return getattr(phase.loss, "gradient", None) if fits else None


def run_stacked(net: Net, phases: Sequence[Train]) -> list[Trained]:
    """Phases on features, one row of the stack a client; longest epoch first, so that active clients are a prefix."""
    order = sorted(range(len(phases)), key=lambda i: (-phases[i].source.size, i))
    stack = [phases[i] for i in order]
    first = stack[0]
    many = len(stack) > 1  # one client needs no client axis
    tensors = {b: _stack([p.weights[b] for p in stack], many) for b in TAIL}
    parameters = [tensors[b][k].requires_grad_() for b in first.blocks for k in tensors[b]]
    anchor = [p.detach().clone() for p in parameters] if first.proximal else None
    optimiser, rngs = Optimiser(first.settings, parameters), [generator_of(net, p) for p in stack]
    constants = _stack([p.constants for p in stack], many)
    losses, steps = torch.zeros(0), [0]
    for rows, steps in epochs(stack, rngs):
        losses = torch.zeros(len(stack), max(steps), device=parameters[0].device)
        for number in range(max(steps)):
            n = sum(number < s for s in steps)
            who = slice(n) if many else 0
            batch = {k: v[who, number] for k, v in rows.items()} | _first(constants, n, len(stack))
            adapter, head = (_first(tensors[b], n, len(stack)) for b in TAIL)
            tail = Tail(adapter, head, net.cosine)
            losses[who, number] = step(tail, parameters, first, batch, optimiser, anchor, n if many else None)
    means = losses.sum(1) / torch.tensor(steps, device=losses.device)
    done: dict[int, Trained] = {}
    for row, (i, mean) in enumerate(zip(order, means.tolist(), strict=True)):
        own = {b: {k: (v[row] if many else v).detach().clone() for k, v in tensors[b].items()} for b in first.blocks}
        done[i] = Trained({**phases[i].weights, **own}, mean, steps[row] * first.epochs)
    return [done[i] for i in range(len(phases))]


def step(
    model: Net | Tail,
    parameters: Sequence[Tensor],
    phase: Train,
    batch: Batch,
    optimiser: Optimiser,
    anchor: list[Tensor] | None,
    rows: int | None = None,
) -> Tensor:
    """One step in place; its loss."""
    loss = loss_of(model, phase, batch)
    part = (lambda ts: [t[:rows] for t in ts]) if rows is not None else list
    grads = part(torch.autograd.grad(loss.sum(), parameters, materialize_grads=True))
    if anchor is not None:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        pull = torch._foreach_sub([p.detach() for p in part(parameters)[: len(anchor)]], part(anchor))
        torch._foreach_add_(list(grads[: len(anchor)]), pull, alpha=2 * phase.proximal)
    clip_(grads, phase.settings.clip, stacked=rows is not None)
    optimiser.step([in_order(g, p) for g, p in zip(grads, parameters, strict=True)], rows)
    return loss.detach()


def loss_of(model: Net | Tail, phase: Train, batch: Batch) -> Tensor:
    """The phase's loss. Of a module set to bf16, the products are computed in bfloat16; parameters, their gradients
    and moments, and everything on features stay in float32."""
    if not getattr(model, "bf16", False):
        return phase.loss(model, batch)
    device = next(model.parameters()).device.type  # type: ignore[union-attr]
    with torch.autocast(device, torch.bfloat16):  # inside the step, so that no cast weight outlives an update
        return phase.loss(model, batch)


def optimiser_of(settings: TrainSettings, parameters: Sequence[Tensor]) -> Optimiser:
    return Optimiser(settings, [in_order(p.detach(), p) for p in parameters])


def in_order(t: Tensor, like: Tensor) -> Tensor:
    """The same numbers with their axes in the order in which `like` lies in memory: the update rules are made for
    tensors without gaps, and channels-last weights are such only from that side."""
    last = like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    return t.permute(0, 2, 3, 1) if last else t


def epochs(stack: Sequence[Train], rngs: Sequence[torch.Generator]) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
    """The epochs of all clients, shuffled and cut: tensors [clients, steps, batch, …], and each client's steps. On a
    GPU, sources that can do so draw together."""
    source, batch = stack[0].source, stack[0].settings.batch
    if rngs[0].device.type == "cuda" and hasattr(source, "together"):
        joined = source.together([p.source for p in stack], batch or source.size)
        for _ in range(stack[0].epochs):
            yield joined.epoch(rngs), joined.steps
        return
    for _ in range(stack[0].epochs):
        yield one_by_one(stack, rngs)


def one_by_one(stack: Sequence[Train], rngs: Sequence[torch.Generator]) -> tuple[dict[str, Tensor], list[int]]:
    """One epoch, client by client."""
    table: dict[str, Tensor] = {}
    steps = []
    for client, (phase, rng) in enumerate(zip(stack, rngs, strict=True)):
        rows, index = phase.source.epoch(rng), cut(phase.source.size, phase.settings.batch, rng)
        steps.append(len(index))
        for k, v in rows.items():
            if client == 0:  # the longest
                table[k] = v.new_zeros(len(stack), *index.shape, *v.shape[1:])
            into = table[k][client, : len(index)]
            torch.index_select(v, 0, index.flatten(), out=into.flatten(0, 1))
    return table, steps


def _stack(parts: Sequence[dict[str, Tensor]], many: bool) -> dict[str, Tensor]:
    return {k: torch.stack([part[k] for part in parts]) if many else parts[0][k].clone() for k in parts[0]}


def _first(tensors: dict[str, Tensor], n: int, of: int) -> dict[str, Tensor]:
    return tensors if n == of else {k: v[:n] for k, v in tensors.items()}
