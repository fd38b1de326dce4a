"""The reference way to run a training phase: one client, one step after another, by autograd.

A step is: loss, gradient, proximal term, clipping, update. Updates (SGD, Adam) are torch's fused kernels on lists of
tensors, without synchronising a GPU. Faster ways (`accel`) give the same results up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from profcil.config import TrainSettings
from profcil.engine.phases import Batch, Train, Trained, batch_rows
from profcil.model.net import MODEL, TAIL, Net, Tail, Weights

BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8


def run(net: Net, phase: Train) -> Trained:
    """Trains the blocks of a phase from its weights."""
    return train_features(net, phase) if phase.on_features else train_net(net, phase)


def train_net(net: Net, phase: Train) -> Trained:
    """A phase that trains the base: weights are loaded into the module and trained in place."""
    net.load(phase.weights)
    parameters, pulled = unfreeze(net, phase.blocks)
    loss, steps = train(net, phase, net, parameters, pulled)
    return Trained({**phase.weights, **net.weights(phase.blocks)}, loss, steps)


def train_features(net: Net, phase: Train) -> Trained:
    """A phase on features: copies of adapter and head are trained."""
    tensors: Weights = {}
    for block in TAIL:
        tensors[block] = {name: t.clone() for name, t in phase.weights[block].items()}
    parameters = [t.requires_grad_() for block in phase.blocks for t in tensors[block].values()]
    tail = Tail(tensors["adapter"], tensors["head"], net.cosine)
    loss, steps = train(net, phase, tail, parameters, parameters)
    weights = dict(phase.weights)
    for block in phase.blocks:
        weights[block] = {name: t.detach() for name, t in tensors[block].items()}
    return Trained(weights, loss, steps)


def train(
    net: Net, phase: Train, model: Net | Tail, parameters: Sequence[Tensor], pulled: Sequence[Tensor]
) -> tuple[float, int]:
    """All epochs of a phase, in place. Returns the mean loss of the last epoch and the number of steps."""
    anchor = [p.detach().clone() for p in pulled] if phase.proximal else None
    optimiser = Optimiser(phase.settings, parameters)
    rng = generator_of(net, phase)
    losses: list[Tensor] = []
    for _ in range(phase.epochs):
        losses = []
        for batch in batches(phase, rng):
            losses.append(step(model, parameters, phase, batch, optimiser, anchor))
    return float(torch.stack(losses).mean()), optimiser.time


def batches(phase: Train, rng: torch.Generator) -> Iterator[Batch]:
    """One shuffled epoch."""
    rows = phase.source.epoch(rng)
    for index in batch_rows(phase.source, phase.settings.batch, rng):
        batch: Batch = {name: tensor[index] for name, tensor in rows.items()}
        batch |= phase.constants
        batch["rng"] = rng
        if phase.inputs is not None:
            batch["inputs"] = phase.inputs(batch["index"])
        yield batch


def step(
    model: Net | Tail,
    parameters: Sequence[Tensor],
    phase: Train,
    batch: Batch,
    optimiser: Optimiser,
    anchor: list[Tensor] | None,
) -> Tensor:
    """One step in place. Returns its loss."""
    loss = loss_of(model, phase, batch)
    grads = list(torch.autograd.grad(loss.sum(), parameters, materialize_grads=True))
    if anchor is not None:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        pulled = [p.detach() for p in parameters[: len(anchor)]]
        differences = torch._foreach_sub(pulled, anchor)
        torch._foreach_add_(grads[: len(anchor)], differences, alpha=2 * phase.proximal)
    clip_(grads, phase.settings.clip)
    optimiser.step(grads)
    return loss.detach()


def loss_of(model: Net | Tail, phase: Train, batch: Batch) -> Tensor:
    """The phase's loss in the model's precision. On features everything stays in float32."""
    if not isinstance(model, Net) or not model.bf16:
        return phase.loss(model, batch)
    with model.autocast():  # in each step, because autocast caches the cast weights until it ends
        return phase.loss(model, batch)


def unfreeze(net: Net, blocks: Sequence[str]) -> tuple[list[Parameter], list[Parameter]]:
    """Prepares the module for training these blocks. Returns their parameters, and those of them that the proximal term
    acts on. These come first; the projector is not among them."""
    net.train()
    net.requires_grad_(False)
    parameters = net.trainable(blocks)
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters, net.trainable([b for b in blocks if b in MODEL])


def generator_of(net: Net, phase: Train) -> torch.Generator:
    """The phase's random generator, on the model's device."""
    return torch.Generator(device=net.device).manual_seed(phase.seed)


# -- updates ----------------------------------------------------------------------------------------------------------


def clip_(grads: Sequence[Tensor], limit: float) -> None:
    """Scales gradients to a norm of at most `limit`; 0 = no limit."""
    if not limit:
        return
    if grads[0].device.type == "cpu":  # reading a value is cheap here, and a dot product is the fastest norm
        flat = [grad.reshape(-1) for grad in grads]
        norm = sum(float(torch.dot(grad, grad)) for grad in flat) ** 0.5
        if not norm + 1e-6 <= limit:  # also true if the norm is NaN
            torch._foreach_mul_(list(grads), limit / (norm + 1e-6))
        return
    norms = torch.stack(torch._foreach_norm(list(grads))).norm()
    torch._foreach_mul_(list(grads), (limit / (norms + 1e-6)).clamp(max=1.0))


class Rule(NamedTuple):
    """The kind of update and its coefficients."""

    kind: str  # sgd, adam or adamw
    lr: float
    decay: float
    momentum: float


class GradientMoments(NamedTuple):
    """Moments of earlier gradients and the number of updates, for each tensor."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


def fused(
    p: list[Tensor],
    grads: list[Tensor],
    m: GradientMoments,
    rule: Rule,
    excess: Tensor | None = None,
    betas: tuple[float, float] = (BETA1, BETA2),
    eps: float = EPSILON,
) -> None:
    """One update by torch's fused kernels. Gradients are divided by `excess`. TorchScript can compile this function."""
    lr = rule.lr
    decay = rule.decay
    if rule.kind == "sgd":
        torch._fused_sgd_(
            p, grads, m.first if rule.momentum != 0 else [], weight_decay=decay, momentum=rule.momentum, lr=lr,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False, grad_scale=excess, found_inf=None,
        )  # fmt: skip
        return
    torch._foreach_add_(m.steps, 1)
    if rule.kind == "adam":
        torch._fused_adam_(
            p, grads, m.first, m.second, [], m.steps, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay,
            eps=eps, amsgrad=False, maximize=False, grad_scale=excess, found_inf=None,
        )  # fmt: skip
    else:
        torch._fused_adamw_(
            p, grads, m.first, m.second, [], m.steps, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay,
            eps=eps, amsgrad=False, maximize=False, grad_scale=excess, found_inf=None,
        )  # fmt: skip


class Optimiser:
    """The update rule of one phase, and its moments."""

    def __init__(self, settings: TrainSettings, parameters: Sequence[Tensor]) -> None:
        self.s = settings
        self.channels_last = [is_channels_last(p) for p in parameters]
        self.parameters = self.in_memory_order([p.detach() for p in parameters])
        self.time = 0  # updates so far
        adam = settings.optimiser == "adam"
        first = [torch.zeros_like(p) for p in self.parameters]
        second = [torch.zeros_like(p) for p in self.parameters] if adam else []
        steps = [torch.zeros((), device=p.device) for p in self.parameters]
        self.moments = GradientMoments(first, second, steps)
        self.rule = Rule(rule_kind(settings), settings.lr, settings.weight_decay, settings.momentum)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], *, excess: Tensor | None = None) -> None:
        """One update from these gradients, which may be overwritten and are divided by `excess`."""
        self.time += 1
        dense = [g.contiguous() for g in self.in_memory_order(grads)]
        fused(self.parameters, dense, self.moments, self.rule, excess)

    def in_memory_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views with the axes in the order in which the parameters lie in memory. Fused kernels need tensors without
        gaps, and channels-last weights have none only in that order."""
        pairs = zip(tensors, self.channels_last, strict=True)
        return [t.permute(0, 2, 3, 1) if last else t for t, last in pairs]

    def reset(self) -> None:
        """Sets moments and counts to zero, as at the start of a phase."""
        torch._foreach_zero_([*self.moments.first, *self.moments.second, *self.moments.steps])
        self.time = 0


def rule_kind(settings: TrainSettings) -> str:
    """The kind of update that the settings choose: sgd, adam or adamw."""
    if settings.optimiser != "adam":
        return "sgd"
    return "adam" if settings.decay == "coupled" else "adamw"


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a 4-d tensor lies in memory with its channels last, and not in plain order."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
