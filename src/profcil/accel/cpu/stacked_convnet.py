"""ConvNet for several clients at once, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.accel.cpu.grouped_layers import joined_channels, layer, part
from profcil.encoders.convnet import ConvNet
from profcil.model.layers import BatchNorm


class StackedConvNet(ConvNet):
    """`ConvNet` that can also be computed for several clients at once."""

    @property
    def mixes(self) -> bool:
        """Whether the images of a batch depend on each other."""
        return isinstance(self.norm1, BatchNorm)

    def over_clients(self, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The forward pass of several clients. Images and the clients' tensors, by their names, have a leading client
        axis."""
        clients, batch = x.shape[:2]
        x = joined_channels(self.pixels(x))
        x = layer(x, part(own, "conv1"), self.norm1, part(own, "norm1"))
        x = layer(x, part(own, "conv2"), self.norm2, part(own, "norm2"))
        # One column an image: gradients then have the weights' memory format.
        columns = x.reshape(batch, clients, -1).permute(1, 2, 0)
        bias = own["out.bias"].unsqueeze(2)
        u = torch.baddbmm(bias, own["out.weight"], columns)
        return F.relu(u).mT
