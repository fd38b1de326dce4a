"""The analytic gradient of `losses.supervised` for ConvNet with GroupNorm, for several clients on a CPU.

With autograd, a step is a hundred calls from Python, and two threads compete for the interpreter lock. With the
analytic gradient, an epoch of steps is one compiled call (see `stacked_clients`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from profcil.accel.cpu.grouped_layers import ahead, back, filters, group_mean_matrix
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
    barred = torch.zeros_like(allowed, dtype=images.dtype).masked_fill(~allowed, torch.finfo(images.dtype).min)
    return Layers(one, two, first.eps, barred.unsqueeze(1))


def slopes(w: dict[str, Tensor], to: dict[str, Tensor], layers: Layers, x: Tensor, y: Tensor) -> Tensor:
    """Writes the gradients of a batch of each client and gives the losses. Images `x` are [batch, clients * channels,
    height, width], channels last; classes `y` are [clients, batch, 1]. Tensors are named block.name and have a leading
    client axis."""
    batch = x.shape[0]
    clients = y.shape[0]
    one = ahead(
        x, filters(w["base.conv1.weight"]), w["base.norm1.weight"], w["base.norm1.bias"], layers.first, layers.eps
    )
    two = ahead(
        one[0], filters(w["base.conv2.weight"]), w["base.norm2.weight"], w["base.norm2.bias"], layers.second, layers.eps
    )
    pooled = two[0].reshape(batch, clients, -1).permute(1, 2, 0)  # one column an image
    u = torch.baddbmm(w["base.out.bias"].unsqueeze(2), w["base.out.weight"], pooled).relu_().mT.contiguous()

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

    p = logs.exp_().scatter_add_(2, y, torch.full_like(y, -1, dtype=x.dtype)).mul_(1 / batch)  # ∂loss/∂logits
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
    dout = torch.bmm(w["base.out.weight"].mT, columns).permute(2, 0, 1).reshape(two[0].shape)
    dx, kernel, factor, shift = back(dout, two, True)
    to["base.conv2.weight"].copy_(kernel.unflatten(0, [clients, -1]))
    to["base.norm2.weight"].copy_(factor)
    to["base.norm2.bias"].copy_(shift)
    assert dx is not None
    _, kernel, factor, shift = back(dx, one, False)
    to["base.conv1.weight"].copy_(kernel.unflatten(0, [clients, -1]))
    to["base.norm1.weight"].copy_(factor)
    to["base.norm1.bias"].copy_(shift)
    return losses
