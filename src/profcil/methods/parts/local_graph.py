"""Training on a graph that a client has built itself, instead of on its stored local graph.

The training phase gets the graph as constants, and an epoch's rows are nodes of it, so a loss needs nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from profcil.data.bundle import Inputs, Nodes
from profcil.engine.client import Client
from profcil.engine.phases import Batch
from profcil.model.net import Tensors


def local_graph(client: Client) -> Nodes:
    """The client's local graph: the nodes it owns over the whole stream, and the edges between them."""
    assert isinstance(client.examples, Nodes), "a graph method was given another modality"
    return client.examples


def add_isolated(graph: Nodes, rows: Tensor) -> Nodes:
    """The graph with copies of some examples appended, which have no edges."""
    size = len(graph.x)
    copies = torch.arange(size, size + len(rows), device=rows.device)
    copied = graph.x[graph.nodes[rows]]
    x = torch.cat([graph.x, copied])
    y = torch.cat([graph.y, graph.y[rows]])
    nodes = torch.cat([graph.nodes, copies])
    return replace(graph, x=x, y=y, nodes=nodes)


def graph_constants(graph: Nodes) -> Tensors:
    """The graph as constants of a training phase."""
    return {"x": graph.x, "edges": graph.edges, "nodes": graph.nodes}


def graph_inputs(batch: Batch) -> Inputs:
    """The encoder's inputs for a batch of rows of the graph in `graph_constants`."""
    nodes = batch["nodes"][batch["index"]]
    return batch["x"], batch["edges"], nodes
