"""FedProto (Tan et al., AAAI 2022): clients share class prototypes and pull their features towards them.

Kept: the local loss CE + λ·MSE(z, C_y), averaged over batch and dimensions, in which a label without a prototype
counts as zero; prototypes taken under the local model after training; the count-weighted mean over reporters (the
paper's Eq. 6; the authors' code takes the plain mean); the nearest prototype as the classifier, by
`predict = "prototype"`.

Stored: on the server the prototypes of every class; on a client nothing.

Adapted: the original keeps personal models and shares prototypes only. Here one global model is judged, so weights
are averaged as in FedAvg and prototypes come on top, and the head predicts unless asked otherwise. The feature is z,
the adapter's output: the embedding before the decision layer, as in the original. Prototypes are measured in evaluation
mode on plain inputs, where the authors' code mixes features of changing weights over the last epoch. The server's
bank persists: only reported classes change, since under client-specific orders most classes are away in most rounds.
The budget is of class-level summaries: one prototype a class, five (`prototypes`) in the expanded regime. Several are
k-means centres of a client's features, followed by the server one by one, and a feature is pulled to the nearest.

Left out: personal models, and with them the original's main use, clients with different architectures.

Uncertain: λ = 0.1 is the authors' value for CIFAR-10. On digits (validation seeds) the pull itself does not help, and
λ = 1 harms; prototypes do not keep the head's old rows from drifting, so with the head and all seen classes in the loss
the method forgets as FedAvg does. With the original's own ways, classes of the client in the loss
(`label_space = "local"`) and the nearest prototype as the classifier, it forgets far less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from profcil.config import setting
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.methods.base import Method, Params, Samples, reply
from profcil.methods.parts.prototypes import class_means, merge, no_prototypes, report, rows_of, tables
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Weights


@dataclass(frozen=True)
class FedProtoParams(Params):
    """Settings of FedProto."""

    pull: float = setting(0.1, "λ: weight of the distance between features and prototypes", low=0.0)
    predict: str = setting("head", "what decides: the head or the nearest prototype", choices=("head", "prototype"))
    prototypes: int = setting(1, "prototypes kept of a class", low=1)


class FedProto(Method):
    """FedProto."""

    Params = FedProtoParams
    kinds = frozenset({"model", "prototype"})
    regimes: ClassVar = {"expanded": {"prototypes": 5}}

    def begin(self, weights: Weights) -> ServerState:
        return super().begin(weights).put(prototypes=no_prototypes(weights["adapter"]["scale"]))

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return (*MODEL, "prototypes")

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        allowed = client.allowed(self.label_space(client, inbox))
        target, known = tables(inbox["prototypes"], client.net.classes, self.params.prototypes)
        fit = client.train("fit", weights_of(inbox), MODEL, self.fit_loss, allowed=allowed, target=target, known=known)
        done = yield fit
        z = Tail(done.weights["adapter"], {}).adapt(client.features(done.weights["base"]))
        told = report(z, client.y_list, self.params.prototypes)
        return reply(client, done.weights, MODEL, loss=done.loss, prototypes=told)

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        y, tail = batch["y"], net.tail
        z = tail.adapt(net.base(*net.weak(batch["inputs"], batch["rng"])))
        gap = (z[:, None] - batch["target"][y]).square().mean(2).amin(1) * batch["known"][y]
        return cross_entropy(tail.score(z), y, batch["allowed"]) + self.params.pull * gap.mean()

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        state = super().aggregate(state, replies, when)
        reports = [r.blocks["prototypes"] for r in replies]
        if not reports:
            return state
        return state.put(prototypes=merge(state.blocks["prototypes"], reports, count=self.params.prototypes))

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"prototypes": (class_means(state.blocks["prototypes"]), net.tail.adapt)}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """The prototypes themselves: all that is remembered of a class."""
        bank = state.blocks["prototypes"]
        return Samples("adapted", (rows_of(bank, label)[:count],)) if label in bank.labels else None

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        if self.params.predict == "head":
            return net.classify(features)
        rows, known = tables(state.blocks["prototypes"], net.classes, self.params.prototypes)
        distance = torch.cdist(net.tail.adapt(features), rows.flatten(0, 1)).view(len(features), *rows.shape[:2])
        return -distance.amin(2).masked_fill(~known, torch.inf)


METHOD = FedProto
