r"""FedProto (Tan et al., AAAI 2022): clients share class prototypes and pull their features towards them.

Kept: the local loss CE + λ·MSE(z, C_y), averaged over batch and dimensions, where a label without a prototype
contributes zero; prototypes measured under the local model after training; the count-weighted mean over the reporting
clients (the paper's Eq. 6; the authors' code takes the plain mean); the nearest prototype as the classifier, with
`predict = "prototype"`.

Loss: $`\mathcal{L} = \mathrm{CE}_S(f_w(x), y) + \frac{\lambda}{d} \min_k \lVert z(x) - p_{yk} \rVert^2`$ with the
prototypes $`p_{yk}`$ of class $`y`$ and $`\lambda`$ = `pull`.

Choose it when: clients may share class means in addition to the model. On the benchmarks here it forgets as much as
FedAvg.

Stored: on the server the prototypes of every class; on a client nothing.

Adapted: the original has personal models and shares prototypes only. Here one global model is evaluated, so weights are
averaged as in FedAvg, prototypes are sent in addition, and by default the head predicts. The feature is z, the
adapter's output: the embedding before the decision layer, as in the original. Prototypes are measured in evaluation
mode on plain inputs; the authors' code averages features over the last epoch while the weights change. The server's
bank persists: only reported classes change, because with client-specific orders most classes are absent in most rounds.
The budget is the number of class-level summaries: one prototype per class, five (`prototypes`) in the expanded regime.
Several prototypes are k-means centres of a client's features. The server tracks each of them, and a feature is pulled
to the nearest one.

Left out: personal models, and with them the original's main use, clients with different architectures.

Uncertain: λ = 0.1 is the authors' value for CIFAR-10. On digits (validation seeds) the pull does not help, and λ = 1
harms. Prototypes do not prevent the drift of the head's old rows: with the head and all seen classes in the loss, the
method forgets as FedAvg does. With the original's own choices, the client's own classes in the loss
(`label_space = "local"`) and the nearest prototype as the classifier, it forgets far less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from profcil.config import setting
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Turn
from profcil.methods.base import Method, Params, Samples, reply
from profcil.methods.parts.prototypes import class_means, merge, no_prototypes, report, rows_of, tables
from profcil.model.layers import distances_between
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Weights


@dataclass(frozen=True)
class FedProtoParams(Params):
    """Settings of FedProto."""

    pull: float = setting(0.1, "λ: weight of the distance between features and prototypes", low=0.0)
    predict: str = setting("head", "what predicts: the head or the nearest prototype", choices=("head", "prototype"))
    prototypes: int = setting(1, "prototypes stored per class", low=1)


class FedProto(Method):
    """FedProto."""

    Params = FedProtoParams
    params: FedProtoParams
    kinds = frozenset({"model", "prototype"})
    regimes: ClassVar = {"expanded": {"prototypes": 5}}

    def begin(self, weights: Weights) -> ServerState:
        empty = no_prototypes(weights["adapter"]["scale"])
        return super().begin(weights).put(prototypes=empty)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return (*MODEL, "prototypes")

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        allowed = client.allowed(self.label_space(client, inbox))
        target, known = tables(inbox["prototypes"], client.net.classes, self.params.prototypes)
        weights = weights_of(inbox)
        done = yield client.train("fit", weights, MODEL, self.fit_loss, allowed=allowed, target=target, known=known)
        tail = Tail(done.weights["adapter"], {})
        z = tail.adapt(client.features(done.weights["base"]))
        prototypes = report(z, client.y_list, self.params.prototypes)
        return reply(client, done.weights, MODEL, loss=done.loss, prototypes=prototypes)

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        """CE + λ·MSE(z, C_y), with the nearest prototype of the label."""
        y = batch["y"]
        tail = net.tail
        inputs = net.weak(batch["inputs"], batch["rng"])
        z = tail.adapt(net.base(*inputs))
        difference = z[:, None] - batch["target"][y]
        distance = difference.square().mean(2).amin(1)
        pull: Tensor = (distance * batch["known"][y]).mean()
        return cross_entropy(tail.score(z), y, batch["allowed"]) + self.params.pull * pull

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        state = super().aggregate(state, replies, when)
        reports = [r.blocks["prototypes"] for r in replies]
        if not reports:
            return state
        bank = merge(state.blocks["prototypes"], reports, count=self.params.prototypes)
        return state.put(prototypes=bank)

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"prototypes": (class_means(state.blocks["prototypes"]), net.tail.adapt)}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """The prototypes themselves."""
        bank = state.blocks["prototypes"]
        if label not in bank.labels:
            return None
        rows = rows_of(bank, label)[:count]
        return Samples("adapted", (rows,))

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        if self.params.predict == "head":
            return net.classify(features)
        rows, known = tables(state.blocks["prototypes"], net.classes, self.params.prototypes)
        z = net.tail.adapt(features)
        to_each_row = distances_between(z, rows.flatten(0, 1))
        distance = to_each_row.view(z.shape[0], *rows.shape[:2])
        return -distance.amin(2).masked_fill(~known, torch.inf)

    def deployed(self, state: ServerState) -> ServerState:
        if self.params.predict == "prototype":
            return state.only(*MODEL, "prototypes")
        return state.only(*MODEL)

    def temperature(self, state: ServerState) -> float | None:
        """Distances to prototypes are no log-probabilities."""
        return 1.0 if self.params.predict == "head" else None


METHOD = FedProto
