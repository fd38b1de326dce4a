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
    two = group_mean_matrix(second.num_channels, second.num_groups, (height // 2) * (width // 2), images.dtype)
    lowest = torch.finfo(images.dtype).min
    barred = torch.zeros_like(allowed, dtype=images.dtype).masked_fill(~allowed, lowest)
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
    pooled = second[0].reshape(batch, clients, -1).permute(1, 2, 0)  # one column an image
    u_columns = torch.baddbmm(w["base.out.bias"].unsqueeze(2), w["base.out.weight"], pooled).relu_()
    u = u_columns.mT.contiguous()

    # The tail: v = scale ⊙ LayerNorm(u) + shift, h = ReLU(down v), z = u + up h, logits = head z.
    n, mean, inverse = torch.native_layer_norm(u, u.shape[2:], None, None, 1e-5)
    scale = w["adapter.scale"].unsqueeze(1)
    down = w["adapter.down"]
    up = w["adapter.up"]
    head = w["head.weight"]
    v = torch.addcmul(w["adapter.shift"].unsqueeze(1), n, scale)
    h = torch.baddbmm(w["adapter.down_bias"].unsqueeze(1), v, down.mT).relu_()
    z = (u + w["adapter.up_bias"].unsqueeze(1)).baddbmm_(h, up.mT)
    logs = torch.baddbmm(layers.barred, z, head.mT).log_softmax(2)
    losses = -logs.gather(2, y).mean([1, 2])

    minus_one = torch.full_like(y, -1, dtype=x.dtype)
    p = logs.exp_().scatter_add_(2, y, minus_one).mul_(1 / batch)  # ∂loss/∂logits
    torch.bmm(p.mT, z, out=to["head.weight"])
    dz = torch.bmm(p, head)
    torch.sum(dz, [1], out=to["adapter.up_bias"])
    torch.bmm(dz.mT, h, out=to["adapter.up"])
    dh = torch.ops.aten.threshold_backward(torch.bmm(dz, up), h, 0)
    torch.sum(dh, [1], out=to["adapter.down_bias"])
    torch.bmm(dh.mT, v, out=to["adapter.down"])
    dv = torch.bmm(dh, down)
    torch.sum(dv, [1], out=to["adapter.shift"])
    torch.sum(dv * n, [1], out=to["adapter.scale"])
    du = torch.ops.aten.native_layer_norm_backward(
        dv.mul_(scale), u, u.shape[2:], mean, inverse, None, None, [True, False, False]
    )[0]

    columns = torch.ops.aten.threshold_backward(du.add_(dz), u, 0).mT
    torch.sum(columns, [2], out=to["base.out.bias"])
    torch.bmm(columns, pooled.mT, out=to["base.out.weight"])
    dpooled = torch.bmm(w["base.out.weight"].mT, columns)
    dout = dpooled.permute(2, 0, 1).reshape(second[0].shape)
    dx, dkernel, dscale, dshift = layer_backward(dout, second, True)
    to["base.conv2.weight"].copy_(dkernel.unflatten(0, [clients, -1]))
    to["base.norm2.weight"].copy_(dscale)
    to["base.norm2.bias"].copy_(dshift)
    assert dx is not None
    _, dkernel, dscale, dshift = layer_backward(dx, first, False)
    to["base.conv1.weight"].copy_(dkernel.unflatten(0, [clients, -1]))
    to["base.norm1.weight"].copy_(dscale)
    to["base.norm1.bias"].copy_(dshift)
    return losses
