r"""MOTION (Wan et al., NeurIPS 2025): a coarsened graph of the past on every client, and updates merged by coordinates.

Kept: a client stores its past as a coarse graph. Nodes are scored by 0.6·(topology) + 0.1·each of 1 − mean cosine,
MMD, Mahalanobis distance and 1 − correlation. Half of them are retained, every other one is merged into the most
similar retained one (mean features, edges remapped), and a reservoir of nodes is never merged. Later training is
cross-entropy on the merged graph. The server merges updates in the manner of PCB-merging: weights exp(K·norm(Δ)²)·
tanh(Δ_c·ΣΔ) on each coordinate, above zero for a client's largest tenth.

The released scorer is a mixture of experts over topology and features that is created at every call with random
weights and never trained. It is replaced by the mean of five topological quantities, which are computed with tensors
and without randomness: degree, clustering, PageRank, eigenvector centrality, spread of the neighbours' degrees.
Betweenness and closeness need all shortest paths and are left out.

Loss: $`\mathcal{L} = \mathrm{CE}_S(f_w(v; G), y_v)`$ over nodes $`v`$ of the coarse graph $`G`$: the current ones, and
B of each old class.

Choose it when: the data are graphs and clients may store a coarse graph of their past. It is the strongest baseline on
homogeneous graphs.

Stored: on the server nothing; on a client its past as a coarse graph.

Adapted: a client coarsens once a position, in its first turn of the next one, under the broadcast model; the released
code fails at the second round of a task. Only nodes whose labels the client has seen by then are coarsened; nodes of
later positions stay in the graph, unchanged and without a label. Merging is within a class: the released code averages
one-hot labels of all merged nodes, including validation and test nodes, so that a node's label can change and labels
leak. Here a client has training nodes only, its private state records the labels it was shown, and no other label is
read. Half of every class is retained. The budget is that of all replaying methods: B coarse nodes per old class and
local epoch, repeated if there are fewer, in one mean with the current nodes.

The released merge scales updates by n_c/N before it averages them, which makes a step K times too small. Here n_c/N
is a factor of the weights, so equal updates give FedAvg's step. On coordinates where all weights are zero, FedAvg's
average is taken (`rest`); the alternative is not to move these nine tenths. Its clipping of extreme updates is left
out.

Uncertain: which nodes the four distances compare with (here all that are coarsened), and the reservoir: the paper's
200 nodes are more than half of what a client owns of Cora, so hardly any node would be merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from profcil.config import setting
from profcil.data.bundle import Nodes
from profcil.engine.channel import Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client, embed
from profcil.engine.phases import Batch, Train, Turn
from profcil.methods.base import Method, Params, Samples, reply, with_replay
from profcil.methods.parts.coarsening import coarse_graph, merge_nodes, retention_score
from profcil.methods.parts.exemplars import ReplaySource, join_inputs
from profcil.methods.parts.local_graph import graph_constants, graph_inputs, local_graph
from profcil.methods.parts.merging import merged_step
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tensors, Weights
from profcil.randomness import torch_generator

HIDDEN = -1  # the label of a node that the client has not been shown


@dataclass(frozen=True)
class MotionParams(Params):
    """Settings of MOTION."""

    budget: int = setting(20, "B: coarse nodes in the loss per old class, client and local epoch", low=0)
    keep: float = setting(0.5, "share of the nodes of a class that each coarsening retains", low=0.0, high=1.0)
    reservoir: int = setting(
        50, "nodes a client never merges, drawn uniformly from all whose labels it has seen", low=0
    )
    part: float = setting(0.1, "share of the coordinates on which a client has a weight above zero", low=0.0, high=1.0)
    rest: str = setting(
        "average", "coordinates on which all weights are zero: averaged, or not moved", choices=("average", "still")
    )


class Motion(Method):
    """MOTION."""

    Params = MotionParams
    modalities = frozenset({"graph"})
    regimes: ClassVar = {"expanded": {"budget": 100}}

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        private = self.private(client, inbox)
        graph, coarse_node = coarsen(local_graph(client), private)
        is_current = client.allowed(client.labels)
        is_old = (graph.y != HIDDEN) & ~is_current[graph.y]
        old = torch.nonzero(is_old).flatten()
        client.keep(graph.x[old])
        current = coarse_node[local_graph(client).nodes[client.current]]
        source = ReplaySource(current, old, graph.y, self.params.budget)
        fit = self.fit(client, inbox, graph, source)
        done = yield fit
        answer = reply(client, done.weights, MODEL, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed)
        return replace(answer, private=private)

    def fit(self, client: Client, inbox: Inbox, graph: Nodes, source: ReplaySource) -> Train:
        """The training phase: on the local graph if nothing is replayed, else on the coarse graph."""
        weights = weights_of(inbox)
        allowed = client.allowed(self.label_space(client, inbox))
        if not source.replayed:
            return client.train("fit", weights, MODEL, self.fit_loss, allowed=allowed)
        constants = {"allowed": source.allow_stored(allowed), **graph_constants(graph)}
        fit = client.train("fit", weights, MODEL, self.replay_loss, source)
        return replace(fit, constants=constants)

    def replay_loss(self, net: Net, batch: Batch) -> Tensor:
        logits = net(*net.weak(graph_inputs(batch), batch["rng"]))
        loss: Tensor = cross_entropy(logits, batch["y"], batch["allowed"])
        return loss

    def private(self, client: Client, inbox: Inbox) -> Tensors:
        """For every node of the local graph its representative, and its label if the client has been shown it."""
        graph = local_graph(client)
        private = dict(client.private or {}) or initial_state(graph)
        if int(private["position"]) not in (HIDDEN, client.when.position):
            private["cluster"] = self.coarser_cluster(client, inbox, private)
        private["y"] = private["y"].index_copy(0, graph.nodes[client.current], client.y)
        private["position"] = torch.tensor(client.when.position)
        return private

    def coarser_cluster(self, client: Client, inbox: Inbox, private: Tensors) -> Tensor:
        """The clustering after one more coarsening of all nodes with a label."""
        graph, coarse_node = coarsen(local_graph(client), private)
        shown = torch.nonzero(graph.y != HIDDEN).flatten()
        h = embed(client.net, inbox["base"].tensors, graph, shown)
        protected = torch.zeros_like(graph.y, dtype=torch.bool)
        protected[coarse_node[self.reservoir(client, private["y"])]] = True
        score = retention_score(h, graph.edges, shown, len(graph.x))
        merged_into = merge_nodes(h, graph.y[shown], score, self.params.keep, protected[shown])
        representative: Tensor = torch.unique(private["cluster"])  # of each coarse node
        coarser = representative.index_copy(0, shown, representative[shown[merged_into]])
        return coarser[coarse_node]

    def reservoir(self, client: Client, y: Tensor) -> Tensor:
        """A uniform sample of the nodes with a label: those with the smallest random keys. The key of a node never
        changes. So a node that left the sample never returns, as in reservoir sampling."""
        rng = torch_generator(client.seed, "reservoir", client.id)
        key = torch.rand(len(y), generator=rng).to(y.device)
        shown = torch.nonzero(y != HIDDEN).flatten()
        order = key[shown].argsort()
        return shown[order[: self.params.reservoir]]

    # -- the server -------------------------------------------------------------------------------------------------

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        if not replies:
            return state
        weights = state.weights()
        start = flatten(weights)
        total = sum(r.samples for r in replies)
        updates = torch.stack([flatten(r.weights()) - start for r in replies])
        shares = [r.samples / total for r in replies]
        share = updates.new_tensor(shares)
        step = merged_step(updates, share, self.params.part, self.params.rest)
        return state.put_weights(unflatten(start + step, weights))

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Coarse nodes of the class, each in its own client's coarse graph."""
        parts = []
        for client in clients:
            if client.private:
                graph, _ = coarsen(local_graph(client), dict(client.private))
                nodes_of_class = torch.nonzero(graph.y == label).flatten()
                if len(nodes_of_class):
                    parts.append(graph.inputs(nodes_of_class))
        if not parts:
            return None
        x, edges, nodes = join_inputs(parts)
        return Samples("inputs", (x, edges, nodes[:count]))


def initial_state(graph: Nodes) -> Tensors:
    """The private state before a client's first turn: every node represents itself, and no label is known."""
    nodes = torch.arange(len(graph.x), device=graph.x.device)
    return {"cluster": nodes, "y": torch.full_like(nodes, HIDDEN), "position": torch.tensor(HIDDEN)}


def coarsen(graph: Nodes, private: Tensors) -> tuple[Nodes, Tensor]:
    """The coarse graph of a client, with all its nodes as examples, and the coarse node of each local node."""
    x, edges, coarse_node = coarse_graph(graph.x, graph.edges, private["cluster"])
    shown = torch.nonzero(private["y"] != HIDDEN).flatten()
    hidden = torch.full((len(x),), HIDDEN, device=x.device)
    y = hidden.index_copy(0, coarse_node[shown], private["y"][shown])
    nodes = torch.arange(len(x), device=x.device)
    return Nodes(x, edges, y, nodes), coarse_node


def flatten(weights: Weights) -> Tensor:
    """All tensors of the model as one vector."""
    order = tensor_order(weights)
    return torch.cat([weights[block][name].flatten() for block, name in order])


def unflatten(vector: Tensor, like: Weights) -> Weights:
    """The inverse of `flatten`, with the shapes of `like`."""
    order = tensor_order(like)
    sizes = [like[block][name].numel() for block, name in order]
    weights: Weights = {block: {} for block in MODEL}
    for (block, name), piece in zip(order, vector.split(sizes), strict=True):
        shape = like[block][name].shape
        weights[block][name] = piece.view(shape).clone()
    return weights


def tensor_order(weights: Weights) -> list[tuple[str, str]]:
    """Block and name of every tensor of the model, in the order of the vector."""
    return [(block, name) for block in MODEL for name in sorted(weights[block])]


METHOD = Motion
