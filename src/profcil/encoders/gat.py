"""A two-layer graph attention network (Velickovic et al., 2018): 8 heads of 8 with ELU, then one head of 64.

There is no dropout: the graph views already drop edges and features, and a forward pass is a pure function of its
inputs in training, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.errors import ConfigError
from profcil.model.layers import drawn, expect, sample, unused

HEADS = 8


class GAT(nn.Module):
    def __init__(self, convolution: Callable[..., Any], columns: int, width: int) -> None:
        super().__init__()
        self.features = HEADS * width
        self.first = convolution(columns, width, heads=HEADS, add_self_loops=False)
        self.first.lin = MappedInput(self.first.lin.weight)
        self.second = convolution(self.features, self.features, heads=1, add_self_loops=False)

    def forward(self, x: Tensor, edges: Tensor, targets: Tensor, kept: Tensor | None = None) -> Tensor:
        """`kept` is the mask of the feature columns to use; by default all are used."""
        weight = self.first.lin.weight
        if kept is not None:
            weight = weight * kept
        edges = with_self_loops(edges, x.shape[0])
        x = self.project(x, weight)
        x = F.pad(x, (0, 0, 0, 1))  # adds a node for dropped edges
        x = F.elu(self.first(x, edges))
        nodes: Tensor = self.second(x, edges)
        return nodes[targets]

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """The first layer's linear map of the node features."""
        return F.linear(x, weight)


class MappedInput(nn.Module):
    """Holds the weight of the first layer's linear map, and returns its input: `GAT.project` has already applied it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x


def with_self_loops(edges: Tensor, nodes: int) -> Tensor:
    """Adds exactly one self-loop per node. Shapes do not depend on values.

    Self-loops in the input (edges that a view dropped) are moved to an extra node, which has no other neighbours.
    """
    without_loops = torch.where(edges[0] == edges[1], nodes, edges)
    loops = torch.arange(nodes, device=edges.device).expand(2, nodes)
    return torch.cat([without_loops, loops], 1)


def glorot(weight: Tensor, generator: torch.Generator) -> None:
    """The initial values of the GAT paper, over the last two dimensions."""
    inputs_and_outputs = weight.shape[-2] + weight.shape[-1]
    bound = (6 / inputs_and_outputs) ** 0.5
    nn.init.uniform_(weight, -bound, bound, generator=generator)


def build(bundle: Bundle, *, generator: torch.Generator, norm: str = "batch", width: int = 0) -> GAT:
    """Builds the encoder. `width` is the size of each of the 8 heads; 0 means 8, for 64 features."""
    unused("gat", norm)
    inputs = sample(bundle)
    expect(len(inputs) == 3, "gat", "a graph", bundle)
    try:
        from torch_geometric.nn import GATConv
    except ImportError:
        raise ConfigError(
            "the gat encoder needs torch-geometric; install it with pip install 'profcil[graph]'"
        ) from None
    columns = inputs[0].shape[1]
    model = drawn(lambda: GAT(GATConv, columns, width or 8), generator)
    for weight in model.parameters():
        if weight.dim() > 1:
            glorot(weight, generator)
    return model
