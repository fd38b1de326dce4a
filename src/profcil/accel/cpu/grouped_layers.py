"""Layers of a small convolutional network for several clients at once, on a CPU.

The clients' channels are concatenated, so that each client is one group of a grouped convolution. Images are channels
last: sums over pixels, products with a number a channel, and torch's pooling then run at memory speed. GroupNorm of
torch does not, and takes longer than the convolution before it. So a layer with GroupNorm has an analytic gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS_LAST = torch.channels_last


def part(own: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of a submodule, by their names in it."""
    prefix = f"{name}."
    found = {}
    for name_in_base, tensor in own.items():
        if name_in_base.startswith(prefix):
            found[name_in_base.removeprefix(prefix)] = tensor
    return found


def joined_channels(x: Tensor) -> Tensor:
    """[clients, batch, channels, height, width] → [batch, clients * channels, height, width]."""
    joined = x.transpose(0, 1).flatten(1, 2)
    return joined.contiguous(memory_format=CHANNELS_LAST)


def filters(weight: Tensor) -> Tensor:
    """A convolution's weights for all clients, [clients, channels, ...] → [clients * channels, ...]."""
    channels_last = weight.movedim(2, 4)
    return channels_last.flatten(0, 1).movedim(3, 1)


def layer(x: Tensor, conv: Mapping[str, Tensor], norm: nn.Module, state: Mapping[str, Tensor]) -> Tensor:
    """relu(max_pool(norm(conv(x)))) of all clients, with a 3x3 convolution. Tensors have a leading client axis."""
    if isinstance(norm, nn.GroupNorm):
        tensors = (conv["weight"], state["weight"], state["bias"])
        return GroupLayer.apply(x, *tensors, norm.num_groups, norm.eps)  # type: ignore[no-untyped-call]
    weight = conv["weight"]
    bias = conv["bias"].flatten() if "bias" in conv else None
    kernel = filters(weight)
    y = F.conv2d(x, kernel, bias, padding=1, groups=len(weight))
    flat_state = {k: v.flatten() for k, v in state.items()}
    y = torch.func.functional_call(norm, flat_state, (y,))
    return F.relu(F.max_pool2d(y, 2))


class GroupLayer(torch.autograd.Function):
    """`layer` with GroupNorm and an analytic gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float) -> Tensor:
        channels = scale.shape[1]
        pixels = x[0, 0].numel()
        group_mean = group_mean_matrix(channels, groups, pixels, x.dtype)
        saved = layer_forward(x, filters(weight), scale, shift, group_mean, eps)
        ctx.save_for_backward(*saved)
        return saved[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx = ctx.needs_input_grad[0]
        dx, dkernel, dscale, dshift = layer_backward(grads[0], ctx.saved_tensors, needs_dx)
        dweight = dkernel.unflatten(0, (len(dscale), -1))
        return dx, dweight, dscale, dshift, None, None


def layer_forward(
    x: Tensor, kernel: Tensor, scale: Tensor, shift: Tensor, group_mean: Tensor, eps: float
) -> list[Tensor]:
    """relu(max_pool(z)) with y = conv(x) and z = scale·(y − mean)·inverse + shift, followed by the tensors that
    `layer_backward` needs.

    Pooling comes before the normalisation, which then computes a quarter of the values only.
    """
    clients = scale.shape[0]
    channels = scale.shape[1]
    ones = [1, 1]
    y = torch.conv2d(x, kernel, None, ones, ones, ones, clients)
    y = y.contiguous(memory_format=torch.channels_last)
    largest, places = largest_scaled(y, scale)
    sums = y.sum([2, 3]).view(-1, channels)
    mean = sums @ group_mean
    squares = (y * y).sum([2, 3])
    variance = squares.view(-1, channels) @ group_mean
    variance.addcmul_(mean, mean, value=-1).clamp_(min=0)
    inverse = variance.add_(eps).rsqrt_()
    factor = inverse.view(-1, clients, channels) * scale
    offset = torch.addcmul(shift, factor, mean.view_as(factor), value=-1)
    image = [y.shape[0], y.shape[1], 1, 1]
    out = torch.addcmul(offset.view(image), largest, factor.view(image))
    out.relu_()
    return [out, x, kernel, y, largest, places, mean, inverse, factor, group_mean]


def layer_backward(grad: Tensor, saved: list[Tensor], needs_dx: bool) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of x, where wanted, and of kernel, scale and shift. With ŷ = (y − mean)·inverse, factor =
    scale·inverse, and means over the pixels and channels of a group: dy = factor·dz − mean(factor·dz) −
    ŷ·mean(factor·dz·ŷ)."""
    out, x, kernel, y, largest, places, mean, inverse, factor, group_mean = saved
    image = [y.shape[0], y.shape[1], 1, 1]
    window = [2, 2]
    ones = [1, 1]
    zeros = [0, 0]
    # The gradient at the maximum of each window; it is 0 elsewhere.
    grad = grad.contiguous(memory_format=torch.channels_last)
    dz = torch.ops.aten.threshold_backward(grad, out, 0)
    dscale, dshift = norm_gradients(dz, largest, mean, inverse)
    flat = factor.view(mean.shape)
    # Both means as one linear function of y: slope·y + offset.
    slope = dscale * flat @ group_mean
    slope.mul_(inverse)
    offset = dshift * flat @ group_mean
    offset.addcmul_(slope, mean, value=-1)
    dz.mul_(factor.view(image))
    dy = torch.ops.aten.max_pool2d_with_indices_backward(dz, y, window, window, zeros, ones, False, places)
    dy.addcmul_(y, slope.view(image), value=-1).sub_(offset.view(image))
    clients = factor.shape[1]
    dx, dkernel, _ = torch.ops.aten.convolution_backward(
        dy, x, kernel, None, ones, ones, ones, False, zeros, clients, [needs_dx, True, False]
    )
    dscale = dscale.view(factor.shape).sum(0)
    dshift = dshift.view(factor.shape).sum(0)
    return dx if needs_dx else None, dkernel, dscale, dshift


def norm_gradients(dz: Tensor, largest: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Σ dz·ŷ and Σ dz over the pixels: the gradients of scale and shift for each image."""
    dshift = dz.sum([2, 3]).view(mean.shape)
    dscale = (dz * largest).sum([2, 3])
    dscale = dscale.view(mean.shape)
    dscale.addcmul_(dshift, mean, value=-1).mul_(inverse)
    return dscale, dshift


@lru_cache(maxsize=64)
def group_mean_matrix(channels: int, groups: int, pixels: int, dtype: torch.dtype) -> Tensor:
    """The group mean matrix: sums over the pixels of each channel, times this matrix, give each channel the mean of its
    group."""
    channels_per_group = channels // groups
    group = torch.arange(channels) // channels_per_group
    same_group = group[:, None] == group
    group_size = pixels * channels // groups
    return same_group.to(dtype) / group_size


def largest_scaled(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The value of every window that is largest after scaling, and its index. A negative scale selects the minimum."""
    if float(scale.min()) >= 0:
        largest, places = torch.ops.aten.max_pool2d_with_indices(y, [2, 2])
        return largest, places
    sign = torch.where(scale < 0, -1.0, 1.0)
    sign = sign.to(y.dtype).view(-1, 1, 1)
    signed = y * sign
    largest, places = torch.ops.aten.max_pool2d_with_indices(signed, [2, 2])
    return largest * sign, places
