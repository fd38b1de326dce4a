"""Fused layers of ResNet-18: convolution, BatchNorm, residual sum and ReLU in few passes over memory.

In a small convolutional network on a large GPU, half of a step's time is spent outside the convolutions. cuDNN and
PyTorch take one pass for the statistics, one for the normalisation, one for the sum and one for ReLU, and as many in
the backward pass. The fused kernels read a batch twice and write it once, in both directions.

An output that is used twice, as at a residual block, has two autograd handles. The backward kernel then adds the two
gradients while it reads them. A batch may consist of equal groups: each is normalised by its own statistics, as if the
groups came one after another, while the convolutions see one large batch.

The kernels are written in Triton, which comes with torch's CUDA builds. Without Triton, and on a CPU, plain torch is
used. `forward` and `backward` below are the reference of the BatchNorm kernels in tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.accel.loader import found
from profcil.encoders.resnet18 import Block, ResNet18
from profcil.model.layers import BatchNorm

Handles = tuple[Tensor, Tensor]  # two autograd handles to one output, in the same memory
_recorded = ContextVar("recorded", default=False)


class FusedBatchNorm(BatchNorm):
    """BatchNorm whose observer is given the moments of the input too, computed by a kernel where there is one."""

    groups = 1  # equal parts of a batch, each normalised by its own statistics

    def forward(self, x: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(self, x, moments(x))
        return self.normalise(x)


class FusedBlock(Block):
    """`Block` on pairs of handles: one goes to the convolutions, the other to the shortcut, unless a kernel computes
    the first convolution and the shortcut together."""

    def forward(self, twins: Handles) -> Handles:  # type: ignore[override]
        if isinstance(self.shortcut, nn.Sequential):
            thin, other = self.shortcut
            y, aside = fork(self.conv1, self.norm1, thin, other, twins)  # type: ignore[arg-type]
        else:
            y, _ = layer(self.conv1, self.norm1, twins[0])
            aside = twins[1]
        return layer(self.conv2, self.norm2, y, aside)


class FusedResNet18(ResNet18):
    """`ResNet18` with the same parameters; its layers are computed in few passes over memory."""

    def forward(self, x: Tensor) -> Tensor:
        twins = layer(self.stem, self.norm, self.pixels(x))
        return self.blocks(twins)[0].mean((2, 3))


def layer(
    convolution: nn.Conv2d, norm: nn.Module, x: Tensor, added: Tensor | None = None, *, rectify: bool = True
) -> Handles:
    """relu(norm(convolution(x)) + added) as two autograd handles, by fused kernels where they support it. The backward
    kernel adds the gradients of both handles."""
    return normalised(norm, *convolved(convolution, x, grouped(norm)), added, rectify)


def fork(
    convolution: nn.Conv2d, norm: nn.Module, thin: nn.Conv2d, other: nn.Module, twins: Handles
) -> tuple[Tensor, Tensor]:
    """relu(norm(convolution(x))) and other(thin(x)), where `thin` is a 1x1 convolution. A fused kernel for both uses
    one handle of the input and gives one gradient. Otherwise each layer uses its own handle."""
    x, aside = twins
    if _same_geometry(convolution, thin) and _recorded.get() and fits(x) and filters() is not None:
        step = thin.stride[0]
        weights = [c.weight.to(x.dtype) for c in (convolution, thin)]
        if all(filters().takes(x, weight, step, grouped(norm)) for weight in weights):
            y, sums, z, others = FusedConvPair.apply(x, *weights, step)  # type: ignore[no-untyped-call]
            return normalised(norm, y, sums)[0], normalised(other, z, others, rectify=False)[0]
    return layer(convolution, norm, x)[0], layer(thin, other, aside, rectify=False)[0]


def _same_geometry(convolution: nn.Conv2d, thin: nn.Conv2d) -> bool:
    """Whether the 1x1 filters match the centre tap of the 3x3 filters, with the same stride and outputs."""
    sides = (convolution.kernel_size, convolution.padding, thin.kernel_size, thin.padding)
    plain = convolution.bias is None and thin.bias is None and convolution.out_channels == thin.out_channels
    return plain and convolution.stride == thin.stride and sides == ((3, 3), (1, 1), (1, 1), (0, 0))


def normalised(
    norm: nn.Module, y: Tensor, sums: Tensor | None, added: Tensor | None = None, rectify: bool = True
) -> Handles:
    """relu(norm(y) + added) as two autograd handles. `sums`: partial sums for the statistics, where the convolution's
    kernel has computed them."""
    groups = grouped(norm)
    if isinstance(norm, BatchNorm) and norm.training and fits(y):
        running = (norm.running_mean, norm.running_var, float(norm.momentum or 0), norm.eps)
        return Normalise.apply(y, norm.weight, norm.bias, added, sums, *running, groups, rectify)  # type: ignore[no-untyped-call]
    if isinstance(norm, BatchNorm) and settled(norm, y):
        y = kernels().apply(y, norm.weight, norm.bias, added, norm.running_mean, norm.running_var, norm.eps, rectify)
        return y, y
    if isinstance(norm, BatchNorm) and passes(norm, y):
        frozen = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        observed = norm.observer is not None
        first, second, *mean_and_var = EvalNormalise.apply(y, added, sums, *frozen, rectify, observed)  # type: ignore[no-untyped-call]
        if norm.observer is not None:
            norm.observer(norm, y, tuple(mean_and_var))
        return first, second
    y = norm(y) if added is None else norm(y) + added
    y = y.relu() if rectify else y
    return y, y


def grouped(norm: nn.Module) -> int:
    """The number of groups of a batch that this layer normalises separately."""
    return norm.groups if isinstance(norm, FusedBatchNorm) else 1


def settled(norm: BatchNorm, y: Tensor) -> bool:
    """Whether the eval-mode kernel without a backward pass can be used."""
    last = y.is_contiguous(memory_format=torch.channels_last)
    return y.is_cuda and last and not (norm.training or torch.is_grad_enabled()) and kernels() is not None


def passes(norm: BatchNorm, y: Tensor) -> bool:
    """Whether the eval-mode kernel with a backward pass can be used: the layer is frozen, but its input has a
    gradient."""
    trained = norm.training or norm.weight.requires_grad or norm.bias.requires_grad
    return torch.is_grad_enabled() and not trained and fits(y)


def convolved(convolution: nn.Conv2d, x: Tensor, groups: int = 1) -> tuple[Tensor, Tensor | None]:
    """The convolution, and the partial sums for a BatchNorm where the kernel computes them."""
    step = convolution.stride[0]
    may_be_stem = _recorded.get() and convolution.bias is None and enters(x)
    if may_be_stem and stem().takes(x, convolution.weight, step, convolution.padding, groups):
        return Stem.apply(x, convolution.weight.to(torch.bfloat16))  # type: ignore[no-untyped-call]
    if not fits(x) or convolution.bias is not None:
        return convolution(x), None
    weight = convolution.weight.to(x.dtype)
    if convolution.kernel_size == (1, 1) and step > 1:
        return StridedConv1x1.apply(x, weight, step), None  # type: ignore[no-untyped-call]
    may_be_fused = _recorded.get() and convolution.padding == (1, 1) and filters() is not None
    if may_be_fused and filters().takes(x, weight, step, groups):
        return FusedConv3x3.apply(x, weight, step)  # type: ignore[no-untyped-call]
    return convolution(x), None


def fits(x: Tensor) -> bool:
    """Whether the kernels support this tensor: bfloat16 on a GPU, channels last."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    return x.is_cuda and x.dtype == torch.bfloat16 and last and x.shape[1] % 16 == 0 and kernels() is not None


def enters(x: Tensor) -> bool:
    """Whether the stem's kernel supports these images: under bfloat16 autocast and without a gradient. It rounds them
    as it reads them."""
    low = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return x.is_cuda and low and not x.requires_grad and stem() is not None


def kernels() -> Any:
    """The module of BatchNorm kernels; None without Triton."""
    return found("triton.batchnorm")


@cache
def filters() -> Any:
    """The module of 3x3 convolution kernels; None where Triton is missing or the GPU is not supported."""
    return found("triton.conv3x3") if _supported_gpu() else None


@cache
def stem() -> Any:
    """The module of the stem's kernels; None where Triton is missing or the GPU is not supported."""
    return found("triton.conv_stem") if _supported_gpu() else None


def _supported_gpu() -> bool:
    """Whether the GPU has the copy engine that the convolutions use (compute capability 9)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@contextmanager
def recorded() -> Iterator[None]:
    """Marks code that is recorded as a CUDA graph, in which kernel launches cost nothing. Outside, cuDNN's convolutions
    are faster, because a launch by Triton takes long."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


@contextmanager
def groups(base: nn.Module, number: int) -> Iterator[None]:
    """Inside, every BatchNorm normalises a batch in this number of equal groups."""
    norms = [m for m in base.modules() if isinstance(m, FusedBatchNorm)]
    for m in norms:
        m.groups = number
    try:
        yield
    finally:
        for m in norms:
            m.groups = 1


def joins(base: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether this encoder can compute several batches of images as one."""
    first = batches[0][0]
    same = all(len(b) == 1 and b[0].shape == first.shape and b[0].dtype == first.dtype for b in batches)
    on = first.is_cuda and torch.is_autocast_enabled("cuda") and kernels() is not None
    return (
        same
        and on
        and first.dim() == 4
        and base.training
        and any(isinstance(m, FusedBatchNorm) for m in base.modules())
    )


class StridedConv1x1(torch.autograd.Function):
    """A strided 1x1 convolution. The forward pass drops the skipped pixels first: cuDNN's kernel for a strided 1x1
    filter takes three times as long. The backward pass is cuDNN's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, step: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.step = step
        used = x[:, :, ::step, ::step].contiguous(memory_format=torch.channels_last)
        return F.conv2d(used, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_cudnn_backward(grads[0], x, weight, ctx.step, ctx.needs_input_grad[:2]), None


class FusedConv3x3(torch.autograd.Function):
    """A 3x3 convolution by Triton kernels, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, step: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.step = step
        y, sums = filters().ahead(x, weight, step)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradient of `sums`
        return y, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d = grads[0].contiguous(memory_format=torch.channels_last)
        for_x, for_weight, _ = ctx.needs_input_grad
        dx = filters().back(d, weight, ctx.step) if for_x else None
        dw = filters().slopes(d, x, ctx.step) if for_weight else None
        return dx, dw, None


class FusedConvPair(torch.autograd.Function):
    """A 3x3 and a 1x1 convolution of the same images with the same stride. One kernel computes the images' gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, thin: Tensor, step: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, thin)
        ctx.step = step
        y, sums = filters().ahead(x, weight, step)
        z, thin_sums = filters().ahead(x, thin, step)
        ctx.mark_non_differentiable(sums, thin_sums)
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradients of the sums
        return y, sums, z, thin_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, thin = ctx.saved_tensors
        grad, _, thin_grad, _ = grads
        existing = thin_grad if grad is None else grad
        assert existing is not None  # autograd calls `backward` only where an output has a gradient
        complete = (torch.zeros_like(existing) if g is None else g for g in (grad, thin_grad))
        d, thin_d = (g.contiguous(memory_format=torch.channels_last) for g in complete)
        for_x, for_weight, for_thin, _ = ctx.needs_input_grad
        dx = filters().back(d, weight, ctx.step, (thin_d, thin)) if for_x else None
        dw = filters().slopes(d, x, ctx.step, 3) if for_weight else None
        dw_thin = filters().slopes(thin_d, x, ctx.step, 1) if for_thin else None
        return dx, dw, dw_thin, None


class Stem(torch.autograd.Function):
    """The first 3x3 convolution of the network, by Triton kernels. Its input, the images, has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y, sums = stem().ahead(x, weight)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d = grads[0].contiguous(memory_format=torch.channels_last)
        return None, stem().slopes(d, x, weight) if ctx.needs_input_grad[1] else None


def _cudnn_backward(
    d: Tensor, x: Tensor, weight: Tensor, step: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """cuDNN's gradients of a 1x1 convolution's input and weight, where they are wanted."""
    if not any(wanted):
        return None, None
    arguments = (None, [step] * 2, [0, 0], [1, 1], False, [0, 0], 1, [*wanted, False])
    return torch.ops.aten.convolution_backward(d, x, weight, *arguments)[:2]


class Normalise(torch.autograd.Function):
    """Training-mode BatchNorm of channels-last images, with the residual sum and ReLU; two handles to the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, sums: Tensor | None, mean: Tensor,
        var: Tensor, momentum: float, eps: float, groups: int, rectify: bool,
    ) -> Handles:  # fmt: skip
        compute = kernels().forward if x.is_cuda else forward
        y, centre, scale = compute(x, weight, bias, added, mean, var, momentum, eps, groups, rectify, sums)
        ctx.save_for_backward(x, y if added is not None else None, weight, bias, centre, scale)
        ctx.groups = groups
        ctx.rectify = rectify
        ctx.adds = added is not None
        ctx.set_materialize_grads(False)  # an unused handle has no gradient
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, centre, scale = ctx.saved_tensors
        compute = kernels().backward if x.is_cuda else backward
        given = [g.contiguous(memory_format=torch.channels_last) for g in grads if g is not None]
        dx, dw, db, dadded = compute(given, x, y, weight, bias, centre, scale, ctx.groups, ctx.rectify, ctx.adds)
        return dx, dw, db, dadded, None, None, None, None, None, None, None


class EvalNormalise(torch.autograd.Function):
    """Eval-mode BatchNorm with the residual sum and ReLU, differentiable in its input; two handles to the output.

    Where the layer has an observer, the mean and variance of its input are outputs, too, and differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, sums: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor,
        var: Tensor, eps: float, rectify: bool, watched: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        y = kernels().apply(x, weight, bias, added, mean, var, eps, rectify)
        batch_mean, batch_var = kernels().moments(x, sums) if watched else (None, None)
        adds = added is not None
        ctx.save_for_backward(x, y if adds else None, weight, bias, mean, (var + eps).rsqrt(), batch_mean)
        ctx.rectify = rectify
        ctx.adds = adds
        ctx.set_materialize_grads(False)
        return y, y.detach(), batch_mean, batch_var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, mean, scale, batch_mean = ctx.saved_tensors
        given = [g.contiguous(memory_format=torch.channels_last) for g in grads[:2] if g is not None]
        given = given or [torch.zeros_like(x)]
        of_mean, of_var = (torch.zeros_like(mean) if g is None else g for g in grads[2:])
        count = x.numel() // x.shape[1]
        line = None if batch_mean is None else (batch_mean, of_var * (2 / count), of_mean / count)
        dx, dadded = kernels().through(given, x, y, weight, bias, mean, scale, ctx.rectify, ctx.adds, line)
        return dx, dadded, None, None, None, None, None, None, None, None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float, groups: int, rectify: bool, sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and each group's mean and inverse standard deviation. The running statistics are updated by the
    groups in order. `sums` is for the kernel's signature only."""
    parts = x.float().unflatten(0, (groups, -1))
    mean = parts.mean((1, 3, 4))
    var = parts.var((1, 3, 4), correction=0)
    count = parts[0].numel() // parts.shape[2]
    for m, v in zip(mean, var, strict=True):
        running_mean.lerp_(m, momentum)
        running_var.lerp_(v * count / (count - 1), momentum)
    scale = (var + eps).rsqrt()
    y = _by_group(parts, mean, scale) * weight[:, None, None] + bias[:, None, None]
    y = y.flatten(0, 1) if added is None else y.flatten(0, 1) + added.float()
    return (y.relu() if rectify else y).to(x.dtype), mean, scale


def backward(
    grads: Sequence[Tensor], x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor,
    groups: int, rectify: bool, adds: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of input, weight, bias and `added`, from the gradients of one or both handles. The output `y` is needed
    only where something was added. There, and where both handles have a gradient, the kernel stores the gradient before
    ReLU and goes on with its rounded value; so does this function."""
    parts = x.float().unflatten(0, (groups, -1))
    normed = _by_group(parts, mean, scale)
    out = y if y is not None else (normed * weight[:, None, None] + bias[:, None, None]).flatten(0, 1)
    g = torch.stack([grad.float() for grad in grads]).sum(0)
    g = g * (out > 0) if rectify else g
    g = g.to(x.dtype).float() if adds or len(grads) == 2 else g
    dz = g.unflatten(0, (groups, -1))
    db = dz.sum((1, 3, 4))
    dw = (dz * normed).sum((1, 3, 4))
    count = parts[0].numel() // parts.shape[2]
    centred = dz - _broadcast(db / count) - normed * _broadcast(dw / count)
    dx = (centred * _broadcast(scale) * weight[:, None, None]).flatten(0, 1)
    return dx.to(x.dtype), dw.sum(0), db.sum(0), g.to(x.dtype) if adds else None


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every channel's mean and variance over a batch of images, by a kernel where it supports them."""
    if fits(x) and x.numel() > x.shape[1]:
        return Moments.apply(x)  # type: ignore[no-untyped-call]
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return mean, var


class Moments(torch.autograd.Function):
    """Mean and variance with one pass over the batch forward and one backward; torch takes many passes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = kernels().moments(x)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """∂/∂x of the mean is 1/n, of the variance 2 (x − mean)/n."""
        x, mean = ctx.saved_tensors
        of_mean, of_var = grads
        count = x.numel() // x.shape[1]
        return kernels().affine(x, mean, of_var * (2 / count), of_mean / count)


def _broadcast(per_group: Tensor) -> Tensor:
    """[groups, channels] with axes for broadcasting over images and pixels."""
    return per_group[:, None, :, None, None]


def _by_group(parts: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Every group normalised by its own statistics."""
    return (parts - _broadcast(mean)) * _broadcast(scale)
