"""MOTION (Wan et al., NeurIPS 2025): a coarsened graph of the past on every client, and updates merged by coordinates.

Kept: a client keeps its past as a coarse graph. Nodes are scored by 0.6·(place in the graph) + 0.1·each of 1 − mean
cosine, MMD, Mahalanobis distance and 1 − correlation; half of them stay, every other one is merged into the most
similar that stays (mean features, edges remapped), and a reservoir of nodes is never merged. Later training is
cross-entropy on the merged graph. The server merges updates in the manner of PCB-merging: weights exp(K·norm(Δ)²)·
tanh(Δ_c·ΣΔ) on each coordinate, above zero for a client's largest tenth.

The released scorer is a mixture of experts over topology and features that is made anew at every call with random
weights and never trained. In its place stands the mean of five topological quantities, computed with tensors and
without chance: degree, clustering, PageRank, eigenvector centrality, spread of the neighbours' degrees. Betweenness
and closeness need all shortest paths and are left out.

Stored: on the server nothing; on a client its past as a coarse graph.

Adapted: a client coarsens once a position, at its first turn after it, under the model just broadcast; the released
code breaks at the second round of a task. What is coarsened are the nodes whose labels the client has seen by then;
nodes of later positions stay in the graph as they are, without a label. Merging is within a class: the released
code averages one-hot labels of whatever merges, validation and test nodes too, so that a node's label can change and
labels leak. Here a client holds training nodes only, its private state records the labels it was shown, and no other
label is read. Every class keeps its half. The budget is that of all replaying methods: B coarse nodes per old
class and local epoch, repeated where there are fewer, in one mean with the current nodes.

The released merge scales updates by n_c/N before it averages them, which makes a step K times too small; here n_c/N
enters the weights, so equal updates give FedAvg's step. Where no client has a say, FedAvg's average is taken
(`rest`); letting those nine tenths stand still is the other choice. Its clipping of extreme updates is left out.

Uncertain: against what nodes are compared in the four distances (here all that are coarsened), and the reservoir: the
paper's 200 nodes are more than half of what a client owns of Cora and would leave nothing to coarsen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from profcil.config import setting
from profcil.data.bundle import Nodes
from profcil.engine.channel import When
from profcil.engine.client import Client, embed
from profcil.engine.payload import Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Train, Turn
from profcil.methods.base import Method, Params, Samples, reply, with_replay
from profcil.methods.parts.coarsening import merged, quotient, worth
from profcil.methods.parts.exemplars import Replay, together
from profcil.methods.parts.local_graph import constants_of, graph_of, inputs_of
from profcil.methods.parts.merging import merged_step
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tensors, Weights
from profcil.randomness import torch_generator

HIDDEN = -1  # the label of a node that the client has not been shown


@dataclass(frozen=True)
class MotionParams(Params):
    """Settings of MOTION."""

    budget: int = setting(20, "B: coarse nodes in the loss per old class, client and local epoch", low=0)
    keep: float = setting(0.5, "part of the nodes of a class that stay at each coarsening", low=0.0, high=1.0)
    reservoir: int = setting(50, "nodes a client never merges, drawn evenly from all whose labels it has seen", low=0)
    part: float = setting(0.1, "part of its coordinates on which a client has a say", low=0.0, high=1.0)
    rest: str = setting(
        "average", "coordinates on which no client has a say: averaged, or not moved", choices=("average", "still")
    )


class Motion(Method):
    """MOTION."""

    Params = MotionParams
    modalities = frozenset({"graph"})
    regimes: ClassVar = {"expanded": {"budget": 100}}

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        own = self.private(client, inbox)
        graph, place = coarse(graph_of(client), own)
        shown, now = graph.y != HIDDEN, client.allowed(client.labels)
        old = torch.nonzero(shown & ~now[graph.y]).flatten()
        client.keep(graph.x[old])
        source = Replay(place[graph_of(client).nodes[client.current]], old, graph.y, self.params.budget)
        fit = self.fit(client, inbox, graph, source)
        done = yield fit
        answer = reply(client, done.weights, MODEL, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed)
        return replace(answer, private=own)

    def fit(self, client: Client, inbox: Inbox, graph: Nodes, source: Replay) -> Train:
        weights, allowed = weights_of(inbox), client.allowed(self.label_space(client, inbox))
        if not source.replayed:
            return client.train("fit", weights, MODEL, self.fit_loss, allowed=allowed)
        allowed = allowed.index_fill(0, graph.y[source.stored], True)  # replayed ones compete in any label space
        constants = {"allowed": allowed, **constants_of(graph)}
        return replace(client.train("fit", weights, MODEL, self.replay_loss, source), constants=constants)

    def replay_loss(self, net: Net, batch: Batch) -> Tensor:
        return cross_entropy(net(*net.weak(inputs_of(batch), batch["rng"])), batch["y"], batch["allowed"])

    def private(self, client: Client, inbox: Inbox) -> Tensors:
        """By node of the local graph: which one stands for it, and its label where the client has been shown it."""
        graph, own = graph_of(client), dict(client.private or {})
        nodes = torch.arange(len(graph.x), device=graph.x.device)
        own = own or {"cluster": nodes, "y": torch.full_like(nodes, HIDDEN), "position": torch.tensor(HIDDEN)}
        if int(own["position"]) not in (HIDDEN, client.when.position):
            own["cluster"] = self.coarsened(client, inbox, own)
        own["y"] = own["y"].index_copy(0, graph.nodes[client.current], client.y)
        own["position"] = torch.tensor(client.when.position)
        return own

    def coarsened(self, client: Client, inbox: Inbox, own: Tensors) -> Tensor:
        """The clustering after one more coarsening of all nodes with a label."""
        graph, place = coarse(graph_of(client), own)
        shown = torch.nonzero(graph.y != HIDDEN).flatten()
        h = embed(client.net, inbox["base"].tensors, graph, shown)
        protected = torch.zeros_like(graph.y, dtype=torch.bool)
        protected[place[self.reservoir(client, own["y"])]] = True
        score = worth(h, graph.edges, shown, len(graph.x))
        stands = merged(h, graph.y[shown], score, self.params.keep, protected[shown])
        stood = torch.unique(own["cluster"])  # who stands for each coarse node
        now = stood.index_copy(0, shown, stood[shown[stands]])
        return now[place]

    def reservoir(self, client: Client, y: Tensor) -> Tensor:
        """An even draw from the nodes with a label. Each node has one random key for ever and the smallest are in, so
        that a node can leave the reservoir and never come back, as if it had been filled in passing."""
        key = torch.rand(len(y), generator=torch_generator(client.seed, "reservoir", client.id)).to(y.device)
        shown = torch.nonzero(y != HIDDEN).flatten()
        return shown[key[shown].argsort()[: self.params.reservoir]]

    # -- the server -------------------------------------------------------------------------------------------------

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        if not replies:
            return state
        before, total = state.weights(), sum(r.samples for r in replies)
        start = flat(before)
        updates = torch.stack([flat(r.weights()) - start for r in replies])
        share = updates.new_tensor([r.samples / total for r in replies])
        step = merged_step(updates, share, self.params.part, self.params.rest)
        return state.put_weights(shaped(start + step, before))

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Coarse nodes of the class, each in its own client's coarse graph."""
        graphs = [coarse(graph_of(c), dict(c.private))[0] for c in clients if c.private]
        parts = [g.inputs(torch.nonzero(g.y == label).flatten()) for g in graphs if bool((g.y == label).any())]
        if not parts:
            return None
        x, edges, nodes = together(parts)
        return Samples("inputs", (x, edges, nodes[:count]))


def coarse(graph: Nodes, own: Tensors) -> tuple[Nodes, Tensor]:
    """The client's graph with its past coarsened, all its nodes as examples, and the place of each node in it."""
    x, edges, place = quotient(graph.x, graph.edges, own["cluster"])
    shown = torch.nonzero(own["y"] != HIDDEN).flatten()
    y = torch.full((len(x),), HIDDEN, device=x.device).index_copy(0, place[shown], own["y"][shown])
    return Nodes(x, edges, y, torch.arange(len(x), device=x.device)), place


def flat(weights: Weights) -> Tensor:
    """All parameters of the model in one row."""
    return torch.cat([t.flatten() for b in MODEL for _, t in sorted(weights[b].items())])


def shaped(row: Tensor, like: Weights) -> Weights:
    """The inverse of `flat`."""
    pieces = iter(row.split([t.numel() for b in MODEL for _, t in sorted(like[b].items())]))
    return {b: {k: next(pieces).view(like[b][k].shape).clone() for k in sorted(like[b])} for b in MODEL}


METHOD = Motion
