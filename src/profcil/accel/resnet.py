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

from profcil.accel.loader import kernel_module
from profcil.encoders.resnet18 import ResidualBlock, ResNet18
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


class FusedBlock(ResidualBlock):
    """`ResidualBlock` on pairs of handles: one goes to the convolutions, the other to the shortcut, unless a kernel
    computes the first convolution and the shortcut together."""

    def forward(self, handles: Handles) -> Handles:  # type: ignore[override]
        if isinstance(self.shortcut, nn.Sequential):
            thin, thin_norm = self.shortcut
            y, shortcut = fork(self.conv1, self.norm1, thin, thin_norm, handles)  # type: ignore[arg-type]
        else:
            y, _ = layer(self.conv1, self.norm1, handles[0])
            shortcut = handles[1]
        return layer(self.conv2, self.norm2, y, shortcut)


class FusedResNet18(ResNet18):
    """`ResNet18` with the same parameters; its layers are computed in few passes over memory."""

    def forward(self, x: Tensor) -> Tensor:
        handles = layer(self.stem, self.norm, self.pixels(x))
        features, _ = self.blocks(handles)
        return features.mean((2, 3))


def layer(
    convolution: nn.Conv2d, norm: nn.Module, x: Tensor, added: Tensor | None = None, *, rectify: bool = True
) -> Handles:
    """relu(norm(convolution(x)) + added) as two autograd handles, by fused kernels where they support it. The backward
    kernel adds the gradients of both handles."""
    y, sums = convolved(convolution, x, groups_of(norm))
    return normalised(norm, y, sums, added, rectify)


def fork(
    convolution: nn.Conv2d, norm: nn.Module, thin: nn.Conv2d, thin_norm: nn.Module, handles: Handles
) -> tuple[Tensor, Tensor]:
    """relu(norm(convolution(x))) and thin_norm(thin(x)), where `thin` is a 1x1 convolution. A fused kernel for both
    uses one handle of the input and gives one gradient. Otherwise each layer uses its own handle."""
    x, other_handle = handles
    if _same_geometry(convolution, thin) and _recorded.get() and fits(x) and conv_kernels() is not None:
        step = thin.stride[0]
        groups = groups_of(norm)
        weight = convolution.weight.to(x.dtype)
        thin_weight = thin.weight.to(x.dtype)
        supports = conv_kernels().supports
        if supports(x, weight, step, groups) and supports(x, thin_weight, step, groups):
            y, sums, z, thin_sums = FusedConvPair.apply(x, weight, thin_weight, step)  # type: ignore[no-untyped-call]
            y, _ = normalised(norm, y, sums)
            z, _ = normalised(thin_norm, z, thin_sums, rectify=False)
            return y, z
    y, _ = layer(convolution, norm, x)
    z, _ = layer(thin, thin_norm, other_handle, rectify=False)
    return y, z


def _same_geometry(convolution: nn.Conv2d, thin: nn.Conv2d) -> bool:
    """Whether the 1x1 filters match the centre tap of the 3x3 filters, with the same stride and outputs."""
    if convolution.bias is not None or thin.bias is not None:
        return False
    if convolution.out_channels != thin.out_channels or convolution.stride != thin.stride:
        return False
    is_3x3 = convolution.kernel_size == (3, 3) and convolution.padding == (1, 1)
    is_1x1 = thin.kernel_size == (1, 1) and thin.padding == (0, 0)
    return is_3x3 and is_1x1


def normalised(
    norm: nn.Module, y: Tensor, sums: Tensor | None, added: Tensor | None = None, rectify: bool = True
) -> Handles:
    """relu(norm(y) + added) as two autograd handles. `sums`: partial sums for the statistics, where the convolution's
    kernel has computed them."""
    if isinstance(norm, BatchNorm) and norm.training and fits(y):
        momentum = float(norm.momentum or 0)
        tensors = (y, norm.weight, norm.bias, added, sums, norm.running_mean, norm.running_var)
        return Normalise.apply(*tensors, momentum, norm.eps, groups_of(norm), rectify)  # type: ignore[no-untyped-call]
    if isinstance(norm, BatchNorm) and fits_eval(norm, y):
        statistics = (norm.running_mean, norm.running_var, norm.eps)
        y = norm_kernels().eval_forward(y, norm.weight, norm.bias, added, *statistics, rectify)
        return y, y
    if isinstance(norm, BatchNorm) and fits_frozen(norm, y):
        frozen = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        observed = norm.observer is not None
        first, second, *mean_and_var = EvalNormalise.apply(y, added, sums, *frozen, rectify, observed)  # type: ignore[no-untyped-call]
        if norm.observer is not None:
            norm.observer(norm, y, tuple(mean_and_var))
        return first, second
    y = norm(y)
    if added is not None:
        y = y + added
    if rectify:
        y = y.relu()
    return y, y


def groups_of(norm: nn.Module) -> int:
    """The number of groups of a batch that this layer normalises separately."""
    return norm.groups if isinstance(norm, FusedBatchNorm) else 1


def fits_eval(norm: BatchNorm, y: Tensor) -> bool:
    """Whether the eval-mode kernel without a backward pass can be used."""
    if norm.training or torch.is_grad_enabled():
        return False
    return y.is_cuda and _is_channels_last(y) and norm_kernels() is not None


def fits_frozen(norm: BatchNorm, y: Tensor) -> bool:
    """Whether the eval-mode kernel with a backward pass can be used: the layer is frozen, but its input has a
    gradient."""
    trained = norm.training or norm.weight.requires_grad or norm.bias.requires_grad
    return torch.is_grad_enabled() and not trained and fits(y)


def convolved(convolution: nn.Conv2d, x: Tensor, groups: int = 1) -> tuple[Tensor, Tensor | None]:
    """The convolution, and the partial sums for a BatchNorm where the kernel computes them."""
    if convolution.bias is not None:
        return convolution(x), None
    step = convolution.stride[0]
    padding = convolution.padding
    weight = convolution.weight
    if _recorded.get() and fits_stem(x) and stem_kernels().supports(x, weight, step, padding, groups):
        return Stem.apply(x, weight.to(torch.bfloat16))  # type: ignore[no-untyped-call]
    if not fits(x):
        return convolution(x), None
    weight = weight.to(x.dtype)
    if convolution.kernel_size == (1, 1) and step > 1:
        return StridedConv1x1.apply(x, weight, step), None  # type: ignore[no-untyped-call]
    may_be_fused = _recorded.get() and padding == (1, 1) and conv_kernels() is not None
    if may_be_fused and conv_kernels().supports(x, weight, step, groups):
        return FusedConv3x3.apply(x, weight, step)  # type: ignore[no-untyped-call]
    return convolution(x), None


def fits(x: Tensor) -> bool:
    """Whether the kernels support this tensor: bfloat16 on a GPU, channels last."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not _is_channels_last(x):
        return False
    return x.shape[1] % 16 == 0 and norm_kernels() is not None


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def fits_stem(x: Tensor) -> bool:
    """Whether the stem's kernel supports these images: under bfloat16 autocast and without a gradient. It rounds them
    as it reads them."""
    if not x.is_cuda or x.requires_grad or not torch.is_autocast_enabled("cuda"):
        return False
    return torch.get_autocast_dtype("cuda") == torch.bfloat16 and stem_kernels() is not None


def norm_kernels() -> Any:
    """The module of BatchNorm kernels; None without Triton."""
    return kernel_module("triton.batchnorm")


@cache
def conv_kernels() -> Any:
    """The module of 3x3 convolution kernels; None where Triton is missing or the GPU is not supported."""
    return kernel_module("triton.conv3x3") if _supported_gpu() else None


@cache
def stem_kernels() -> Any:
    """The module of the stem's kernels; None where Triton is missing or the GPU is not supported."""
    return kernel_module("triton.conv_stem") if _supported_gpu() else None


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


def can_join(base: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether this encoder can compute several batches of images as one."""
    first = batches[0][0]
    for batch in batches:
        if len(batch) != 1 or batch[0].shape != first.shape or batch[0].dtype != first.dtype:
            return False
    if not base.training or first.dim() != 4 or not first.is_cuda:
        return False
    if not torch.is_autocast_enabled("cuda") or norm_kernels() is None:
        return False
    return any(isinstance(module, FusedBatchNorm) for module in base.modules())


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
        dx, dw = _cudnn_backward(grads[0], x, weight, ctx.step, ctx.needs_input_grad[:2])
        return dx, dw, None


class FusedConv3x3(torch.autograd.Function):
    """A 3x3 convolution by Triton kernels, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, step: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.step = step
        y, sums = conv_kernels().forward(x, weight, step)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradient of `sums`
        return y, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d = _channels_last(grads[0])
        for_x, for_weight, _ = ctx.needs_input_grad
        dx = conv_kernels().input_gradient(d, weight, ctx.step) if for_x else None
        dw = conv_kernels().filter_gradient(d, x, ctx.step) if for_weight else None
        return dx, dw, None


class FusedConvPair(torch.autograd.Function):
    """A 3x3 and a 1x1 convolution of the same images with the same stride. One kernel computes the images' gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, thin: Tensor, step: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, thin)
        ctx.step = step
        y, sums = conv_kernels().forward(x, weight, step)
        z, thin_sums = conv_kernels().forward(x, thin, step)
        ctx.mark_non_differentiable(sums, thin_sums)
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradients of the sums
        return y, sums, z, thin_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, thin = ctx.saved_tensors
        grad, _, thin_grad, _ = grads
        existing = thin_grad if grad is None else grad
        assert existing is not None  # autograd calls `backward` only where an output has a gradient
        d = _channels_last(torch.zeros_like(existing) if grad is None else grad)
        thin_d = _channels_last(torch.zeros_like(existing) if thin_grad is None else thin_grad)
        for_x, for_weight, for_thin, _ = ctx.needs_input_grad
        dx = conv_kernels().input_gradient(d, weight, ctx.step, (thin_d, thin)) if for_x else None
        dw = conv_kernels().filter_gradient(d, x, ctx.step, 3) if for_weight else None
        dw_thin = conv_kernels().filter_gradient(thin_d, x, ctx.step, 1) if for_thin else None
        return dx, dw, dw_thin, None


class Stem(torch.autograd.Function):
    """The first 3x3 convolution of the network, by Triton kernels. Its input, the images, has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y, sums = stem_kernels().forward(x, weight)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None
        d = _channels_last(grads[0])
        return None, stem_kernels().filter_gradient(d, x, weight)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


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
        compute = norm_kernels().forward if x.is_cuda else forward
        y, centre, scale = compute(x, weight, bias, added, mean, var, momentum, eps, groups, rectify, sums)
        adds = added is not None
        needed_output = y if adds else None
        ctx.save_for_backward(x, needed_output, weight, bias, centre, scale)
        ctx.groups = groups
        ctx.rectify = rectify
        ctx.adds = adds
        ctx.set_materialize_grads(False)  # an unused handle has no gradient
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, centre, scale = ctx.saved_tensors
        compute = norm_kernels().backward if x.is_cuda else backward
        given = [_channels_last(g) for g in grads if g is not None]
        dx, dw, db, dadded = compute(given, x, y, weight, bias, centre, scale, ctx.groups, ctx.rectify, ctx.adds)
        return dx, dw, db, dadded, None, None, None, None, None, None, None


class EvalNormalise(torch.autograd.Function):
    """Eval-mode BatchNorm with the residual sum and ReLU, differentiable in its input; two handles to the output.

    Where the layer has an observer, the mean and variance of its input are outputs, too, and differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, sums: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor,
        var: Tensor, eps: float, rectify: bool, observed: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        y = norm_kernels().eval_forward(x, weight, bias, added, mean, var, eps, rectify)
        batch_mean, batch_var = norm_kernels().moments(x, sums) if observed else (None, None)
        adds = added is not None
        needed_output = y if adds else None
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, needed_output, weight, bias, mean, scale, batch_mean)
        ctx.rectify = rectify
        ctx.adds = adds
        ctx.set_materialize_grads(False)
        return y, y.detach(), batch_mean, batch_var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, mean, scale, batch_mean = ctx.saved_tensors
        *output_grads, dmean, dvar = grads
        given = [_channels_last(g) for g in output_grads if g is not None]
        if not given:
            given = [torch.zeros_like(x)]
        linear = None
        if batch_mean is not None:
            linear = _moments_gradient(x, batch_mean, dmean, dvar)
        flags = (ctx.rectify, ctx.adds)
        dx, dadded = norm_kernels().eval_backward(given, x, y, weight, bias, mean, scale, *flags, linear)
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
    for group_mean, group_var in zip(mean, var, strict=True):
        unbiased = group_var * count / (count - 1)
        running_mean.lerp_(group_mean, momentum)
        running_var.lerp_(unbiased, momentum)
    scale = (var + eps).rsqrt()
    normed = _by_group(parts, mean, scale)
    y = _scaled(normed, weight, bias).flatten(0, 1)
    if added is not None:
        y = y + added.float()
    if rectify:
        y = y.relu()
    return y.to(x.dtype), mean, scale


def backward(
    grads: Sequence[Tensor], x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor,
    groups: int, rectify: bool, adds: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of input, weight, bias and `added`, from the gradients of one or both handles. The output `y` is needed
    only where something was added. There, and where both handles have a gradient, the kernel stores the gradient before
    ReLU and goes on with its rounded value; so does this function."""
    parts = x.float().unflatten(0, (groups, -1))
    normed = _by_group(parts, mean, scale)
    if y is None:
        y = _scaled(normed, weight, bias).flatten(0, 1)
    g = torch.stack([grad.float() for grad in grads]).sum(0)
    if rectify:
        g = g * (y > 0)
    if adds or len(grads) == 2:
        g = g.to(x.dtype).float()
    dz = g.unflatten(0, (groups, -1))
    db = dz.sum((1, 3, 4))
    dw = (dz * normed).sum((1, 3, 4))
    count = parts[0].numel() // parts.shape[2]
    centred = dz - _broadcast(db / count) - normed * _broadcast(dw / count)
    dx = centred * _broadcast(scale) * weight[:, None, None]
    dadded = g.to(x.dtype) if adds else None
    return dx.flatten(0, 1).to(x.dtype), dw.sum(0), db.sum(0), dadded


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every channel's mean and variance over a batch of images, by a kernel where it supports them."""
    if fits(x) and x.numel() > x.shape[1]:
        return BatchMoments.apply(x)  # type: ignore[no-untyped-call]
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return mean, var


class BatchMoments(torch.autograd.Function):
    """Mean and variance with one pass over the batch forward and one backward; torch takes many passes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = norm_kernels().moments(x)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """∂/∂x of the mean is 1/n, of the variance 2 (x − mean)/n."""
        x, mean = ctx.saved_tensors
        dmean, dvar = grads
        return norm_kernels().affine(x, *_moments_gradient(x, mean, dmean, dvar))


def _moments_gradient(
    x: Tensor, mean: Tensor, dmean: Tensor | None, dvar: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x through its mean and variance as (x − centre) factor + shift: centre, factor and shift."""
    count = x.numel() // x.shape[1]
    if dmean is None:
        dmean = torch.zeros_like(mean)
    if dvar is None:
        dvar = torch.zeros_like(mean)
    return mean, dvar * (2 / count), dmean / count


def _broadcast(per_group: Tensor) -> Tensor:
    """[groups, channels] with axes for broadcasting over images and pixels."""
    return per_group[:, None, :, None, None]


def _scaled(normed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normed * weight[:, None, None] + bias[:, None, None]


def _by_group(parts: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Every group normalised by its own statistics."""
    return (parts - _broadcast(mean)) * _broadcast(scale)
