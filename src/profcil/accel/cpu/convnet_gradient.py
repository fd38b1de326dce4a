"""The analytic gradient of `losses.supervised` for ConvNet with GroupNorm, for several clients on a CPU.

With autograd, a step is a hundred calls from Python, and two threads compete for the interpreter lock. With the
analytic gradient, an epoch of steps is one compiled call (see `stacked_clients`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from profcil.accel.cpu.grouped_layers import filters, group_mean_matrix, layer_backward, layer_forward
from profcil.encoders.convnet import ConvNet


class Layers(NamedTuple):
    """Constants of the gradient."""

    first: Tensor  # the group mean matrix of the first layer (see `group_mean_matrix`)
    second: Tensor  # that of the second layer
    eps: float
    barred: Tensor  # [clients, 1, classes]: 0, or the lowest number where a class is not allowed


def layers_of(base: ConvNet, images: Tensor, allowed: Tensor) -> Layers:
    """The constants for these images and allowed classes."""
    height, width = images.shape[-2:]
    first = base.norm1
    second = base.norm2
    assert isinstance(first, nn.GroupNorm) and isinstance(second, nn.GroupNorm)
    one = group_mean_matrix(first.num_channels, first.num_groups, height * width, images.dtype)
    pixels_after_pooling = (height // 2) * (width // 2)
    two = group_mean_matrix(second.num_channels, second.num_groups, pixels_after_pooling, images.dtype)
    lowest = torch.finfo(images.dtype).min
    zeros = torch.zeros_like(allowed, dtype=images.dtype)
    barred = zeros.masked_fill(~allowed, lowest)
    return Layers(one, two, first.eps, barred.unsqueeze(1))


def write_gradients(w: dict[str, Tensor], to: dict[str, Tensor], layers: Layers, x: Tensor, y: Tensor) -> Tensor:
    """Writes the gradients of a batch of each client and gives the losses. Images `x` are [batch, clients * channels,
    height, width], channels last; classes `y` are [clients, batch, 1]. Tensors are named block.name and have a leading
    client axis."""
    batch = x.shape[0]
    clients = y.shape[0]
    kernel = filters(w["base.conv1.weight"])
    first = layer_forward(x, kernel, w["base.norm1.weight"], w["base.norm1.bias"], layers.first, layers.eps)
    kernel = filters(w["base.conv2.weight"])
    second = layer_forward(first[0], kernel, w["base.norm2.weight"], w["base.norm2.bias"], layers.second, layers.eps)
    pooled = second[0].reshape(batch, clients, -1)
    pooled = pooled.permute(1, 2, 0)  # one column an image
    bias = w["base.out.bias"].unsqueeze(2)
    u_columns = torch.baddbmm(bias, w["base.out.weight"], pooled).relu_()
    u = u_columns.mT.contiguous()
    losses, du = write_tail_gradients(w, to, layers.barred, u, y)
    columns = torch.ops.aten.threshold_backward(du, u, 0).mT
    write_base_gradients(w, to, columns, pooled, first, second)
    return losses


def write_tail_gradients(
    w: dict[str, Tensor], to: dict[str, Tensor], barred: Tensor, u: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the gradients of adapter and head; gives the losses and the gradient of u. The forward pass is
    v = scale ⊙ LayerNorm(u) + shift, h = ReLU(down v), z = u + up h, logits = head z."""
    n, mean, inverse = torch.native_layer_norm(u, u.shape[2:], None, None, 1e-5)
    scale = w["adapter.scale"].unsqueeze(1)
    shift = w["adapter.shift"].unsqueeze(1)
    down_bias = w["adapter.down_bias"].unsqueeze(1)
    up_bias = w["adapter.up_bias"].unsqueeze(1)
    down = w["adapter.down"]
    up = w["adapter.up"]
    v = torch.addcmul(shift, n, scale)
    h = torch.baddbmm(down_bias, v, down.mT).relu_()
    z = (u + up_bias).baddbmm_(h, up.mT)
    losses, dz = write_head_gradient(w, to, barred, z, y)
    torch.sum(dz, [1], out=to["adapter.up_bias"])
    torch.bmm(dz.mT, h, out=to["adapter.up"])
    dh = torch.bmm(dz, up)
    dh = torch.ops.aten.threshold_backward(dh, h, 0)
    torch.sum(dh, [1], out=to["adapter.down_bias"])
    torch.bmm(dh.mT, v, out=to["adapter.down"])
    dv = torch.bmm(dh, down)
    torch.sum(dv, [1], out=to["adapter.shift"])
    torch.sum(dv * n, [1], out=to["adapter.scale"])
    dn = dv.mul_(scale)
    wanted = [True, False, False]
    du, _, _ = torch.ops.aten.native_layer_norm_backward(dn, u, u.shape[2:], mean, inverse, None, None, wanted)
    return losses, du.add_(dz)


def write_head_gradient(
    w: dict[str, Tensor], to: dict[str, Tensor], barred: Tensor, z: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of the head; gives the losses and the gradient of z."""
    head = w["head.weight"]
    batch = y.shape[1]
    logs = torch.baddbmm(barred, z, head.mT).log_softmax(2)
    losses = -logs.gather(2, y).mean([1, 2])
    minus_one = torch.full_like(y, -1, dtype=z.dtype)
    p = logs.exp_().scatter_add_(2, y, minus_one)
    p.mul_(1 / batch)  # ∂loss/∂logits
    torch.bmm(p.mT, z, out=to["head.weight"])
    return losses, torch.bmm(p, head)


def write_base_gradients(
    w: dict[str, Tensor],
    to: dict[str, Tensor],
    columns: Tensor,
    pooled: Tensor,
    first: list[Tensor],
    second: list[Tensor],
) -> None:
    """Writes the gradients of the base. `columns`: the gradient of its last linear layer, one column an image."""
    clients = columns.shape[0]
    torch.sum(columns, [2], out=to["base.out.bias"])
    torch.bmm(columns, pooled.mT, out=to["base.out.weight"])
    dpooled = torch.bmm(w["base.out.weight"].mT, columns)
    dout = dpooled.permute(2, 0, 1).reshape(second[0].shape)
    dx, dkernel, dscale, dshift = layer_backward(dout, second, True)
    dweight = dkernel.unflatten(0, [clients, -1])
    to["base.conv2.weight"].copy_(dweight)
    to["base.norm2.weight"].copy_(dscale)
    to["base.norm2.bias"].copy_(dshift)
    assert dx is not None
    _, dkernel, dscale, dshift = layer_backward(dx, first, False)
    dweight = dkernel.unflatten(0, [clients, -1])
    to["base.conv1.weight"].copy_(dweight)
    to["base.norm1.weight"].copy_(dscale)
    to["base.norm1.bias"].copy_(dshift)
