"""Training on a graph that a client has put together itself, instead of on its local graph as it lies there.

The graph travels with the phase as constants and the epoch's rows name nodes in it, so a loss needs nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from profcil.data.bundle import Inputs, Nodes
from profcil.engine.client import Client
from profcil.engine.phases import Batch
from profcil.model.net import Tensors


def graph_of(client: Client) -> Nodes:
    """The client's local graph: what it owns over the whole stream, and no edge to anything else."""
    assert isinstance(client.examples, Nodes), "a graph method was given another modality"
    return client.examples


def with_isolated(graph: Nodes, rows: Tensor) -> Nodes:
    """The graph and, behind its examples, copies of some without any edge."""
    nodes = torch.arange(len(graph.x), len(graph.x) + len(rows), device=rows.device)
    return replace(
        graph,
        x=torch.cat([graph.x, graph.x[graph.nodes[rows]]]),
        y=torch.cat([graph.y, graph.y[rows]]),
        nodes=torch.cat([graph.nodes, nodes]),
    )


def constants_of(graph: Nodes) -> Tensors:
    return {"x": graph.x, "edges": graph.edges, "nodes": graph.nodes}


def inputs_of(batch: Batch) -> Inputs:
    """What the encoder is given for a batch of rows of such a graph."""
    return batch["x"], batch["edges"], batch["nodes"][batch["index"]]
