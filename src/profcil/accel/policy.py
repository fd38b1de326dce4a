"""Every decision of the accelerated path, in one table.

A training phase is run in one of the ways below; the first that applies is taken. `report` says which were taken.

| way | applies to |
|---|---|
| graph | on a GPU, steps that can be recorded: the same batch size every time, a loss without tensors of its own |
| stack-written | on a CPU, 2 or 3 clients, ConvNet with GroupNorm, the supervised loss: its gradient is a formula |
| stack | on a CPU, 2 or 3 clients, ConvNet: several clients in one computation, by autograd |
| head-c | on a CPU, one client, adapter and head, the classification loss: an epoch in C |
| head-script | the same without a compiler, or where the compiled code failed its check: an epoch in TorchScript |
| heads | several clients, adapter and head: one batched computation |
| reference | everything else: one client, one step after another, by autograd |
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn

from profcil.accel.cpu import adapter_head_epoch
from profcil.encoders.convnet import ConvNet
from profcil.engine.phases import Train
from profcil.model import losses
from profcil.model.net import MODEL, TAIL, Net

GRAPH = "graph"
STACK_WRITTEN = "stack-written"
STACK = "stack"
HEAD_C = "head-c"
HEAD_SCRIPT = "head-script"
HEADS = "heads"
REFERENCE = "reference"

SMALL = 40_000  # parameters a client up to which a batch of adapters and heads is faster than one after another
ALONE = "warmup"  # a phase that is computed client by client, so that its cached result does not depend on grouping


def way_of(net: Net, group: Sequence[Train], records: bool) -> str:
    """How a group of phases of different clients is run. `records`: whether there is a GPU to record steps on."""
    phase = group[0]
    if records and recordable(phase):
        return GRAPH
    if not phase.on_features:
        lengths = {p.length for p in group}
        if len(group) == 1 or len(lengths) > 1 or not stackable(net):
            return REFERENCE
        return STACK_WRITTEN if has_written_convnet_gradient(net, phase) else STACK
    if len(group) > 1:
        return HEADS
    if has_written_head_gradient(net, phase):
        return HEAD_C if adapter_head_epoch.checked_library() is not None else HEAD_SCRIPT
    return REFERENCE


def may_be_grouped(net: Net, phase: Train, records: bool, refused: bool) -> bool:
    """Whether this phase may be computed together with those of other clients. `refused`: its loss turned out to work
    for one client only."""
    if not phase.on_features:
        if records:
            return recordable(phase)
        return stackable(net) and phase.name != ALONE and not refused
    if has_written_head_gradient(net, phase):
        return False  # one client after another is faster still
    size = 0
    for block in phase.blocks:
        size += sum(t.numel() for t in phase.weights[block].values())
    return net.device.type != "cpu" or size <= SMALL


def recordable(phase: Train) -> bool:
    """Whether a phase's step can be repeated: not where a batch is all of a client's examples, nor with a loss made for
    this phase, which may hold tensors of its own."""
    loss = phase.loss
    plain_function = inspect.isfunction(loss) and not loss.__closure__
    lasting = inspect.ismethod(loss) or plain_function
    return phase.settings.batch > 0 and lasting


def stackable(net: Net) -> bool:
    """Whether the base can be computed for several clients at once, in the same precision."""
    return hasattr(net.base, "over_clients") and not net.bf16 and net.device.type == "cpu"


def has_written_convnet_gradient(net: Net, phase: Train) -> bool:
    """Whether there is a formula for the gradient of this phase for several clients."""
    trains_all = set(phase.blocks) == set(MODEL)
    supervised = phase.loss is losses.supervised and trains_all
    grouped = isinstance(net.base, ConvNet) and isinstance(net.base.norm1, nn.GroupNorm)
    return supervised and grouped and not net.cosine


def has_written_head_gradient(net: Net, phase: Train) -> bool:
    """Whether there is a formula for the gradient of adapter and head in this phase, and it is faster: on a CPU."""
    linear = phase.blocks == TAIL and not net.cosine
    return linear and phase.loss is losses.classification and net.device.type == "cpu"
