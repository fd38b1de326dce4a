"""FedProto (Tan et al., AAAI 2022): clients share class prototypes and pull their features towards them.

Kept: the local loss CE + λ·MSE(z, C_y), averaged over batch and dimensions, in which a label without a prototype
counts as zero; prototypes taken under the local model after training; the count-weighted mean over reporters (the
paper's Eq. 6; the authors' code takes the plain mean).

Adapted: the original keeps personal models and shares prototypes only. Here one global model is judged, so weights
are averaged as in FedAvg and prototypes come on top. The feature is z, the adapter's output: the embedding before the
decision layer, as in the original. Prototypes are measured in evaluation mode on plain inputs, where the authors'
code mixes features of changing weights over the last epoch. The server's bank persists: only reported classes
change, since under client-specific orders most classes are away in most rounds. The head predicts; the original's
nearest prototype is `predict = "prototype"`.

Uncertain: λ = 0.1 is the authors' value for CIFAR-10, untuned here. Several prototypes a class, one reading of the
expanded budget, are not offered. Prototypes do not keep the head's old rows from drifting, so expect FedAvg's
forgetting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profcil.config import setting
from profcil.encoders.model import MODEL, Net, Tail, Weights, cross_entropy
from profcil.engine.client import Client
from profcil.engine.door import When
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.methods.base import Method, Params, reply
from profcil.methods.parts.prototypes import merge, no_prototypes, report, table


@dataclass(frozen=True)
class FedProtoParams(Params):
    """Settings of FedProto."""

    pull: float = setting(0.1, "λ: weight of the distance between features and prototypes", low=0.0)
    predict: str = setting("head", "what decides: the head or the nearest prototype", choices=("head", "prototype"))


class FedProto(Method):
    """FedProto."""

    Params = FedProtoParams
    kinds = frozenset({"model", "prototype"})

    def begin(self, weights: Weights) -> ServerState:
        return super().begin(weights).put(prototypes=no_prototypes(weights["adapter"]["scale"]))

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return (*MODEL, "prototypes")

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        allowed = client.allowed(self.label_space(client, inbox))
        target, known = table(inbox["prototypes"], client.net.classes)
        fit = client.train("fit", weights_of(inbox), MODEL, self.fit_loss, allowed=allowed, target=target, known=known)
        done = yield fit
        z = Tail(done.weights["adapter"], {}).adapt(client.features(done.weights["base"]))
        return reply(client, done.weights, MODEL, loss=done.loss, prototypes=report(z, client.y))

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        y, tail = batch["y"], net.tail
        z = tail.adapt(net.base(*net.weak(batch["inputs"], batch["rng"])))
        gap = (z - batch["target"][y]).square().mean(1) * batch["known"][y]
        return cross_entropy(tail.score(z), y, batch["allowed"]) + self.params.pull * gap.mean()

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        state = super().aggregate(state, replies, when)
        reports = [r.blocks["prototypes"] for r in replies]
        return state.put(prototypes=merge(state.blocks["prototypes"], reports)) if reports else state

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"prototypes": (state.blocks["prototypes"], net.tail.adapt)}

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        if self.params.predict == "head":
            return net.classify(features)
        mean, known = table(state.blocks["prototypes"], net.classes)
        return -torch.cdist(net.tail.adapt(features), mean).masked_fill(~known, torch.inf)


METHOD = FedProto
