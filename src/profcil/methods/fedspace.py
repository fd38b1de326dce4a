"""FedSpace (Shenaj et al., CVPR Workshops 2023): asynchronous federated class-incremental learning with prototypes.

Kept: every client has its own task order. The client's loss is CE(logits/0.1) over the classes it has met, plus
0.01·CE of the head on pseudo-features p̃ = C_y + ρ·N(0, 1) of prototyped classes it does not hold now, plus 0.01·a
supervised contrastive loss (temperature 1) on normalised features and pseudo-features. The server halves each step,
w ← 0.5·average + 0.5·old, and moves prototypes by 0.1 towards the count-weighted mean of the round's reports. The
radius ρ² = mean_y tr(Σ_y)/d is measured in a client's first position only, over the classes of which it has at least
two examples; ρ is the example-weighted mean over all clients that have reported so far, each by its latest report.

Stored: on the server the prototypes of every class and a radius of every client; on a client which classes it has met.

Adapted: prototypes and pseudo-features live in z, before the one global head; the shared warm-up replaces the fractal
pre-training. The bank persists: the released code drops every class that is absent in a round. Which classes a client
has met is its private state, and grows when it takes part. The pseudo-feature loss competes over classes met or
prototyped, not over rows nobody has trained. The budget is `quota` pseudo-features per prototyped class and epoch,
spread over the steps with classes in balance (exact per epoch up to rounding to whole steps, per class in
expectation), and one draw serves both losses. The expanded regime has a quota of 100 and five prototypes a class
(k-means centres; the authors have a queue of past prototypes), drawn from in turn. Contrastive anchors are the real
features only, since anchors among pseudo-features would cost (quota·classes)² similarities, and an anchor is not
compared with itself.

Left out: the four rotations as extra labels. They quadruple the cost of a step and mean nothing for text and graphs;
this is the rotation-free variant for every modality.

Uncertain: the weights and the temperature were the authors' choice for Adam at 1e-3 over 5000 rounds. With ten rounds a
position a rehearsal weight of 0.01 does next to nothing: on digits (validation seeds) it takes 30 to 300 to keep old
classes. Prototypes of classes that are away are never moved along, so a base that moves leaves them behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import Checked, setting
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.memory.bank import Moments, bank_from_moments, moments_of_rows
from profcil.methods.base import Method, Samples, reply, with_replay
from profcil.methods.parts.prototypes import class_means, merge, no_prototypes, report, rows_of, tables
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Tensors, Weights
from profcil.tensors import to_device

RADIUS = "radius/"  # before the ids of clients: what each has measured


@dataclass(frozen=True)
class FedSpaceParams(Checked):
    """Settings of FedSpace."""

    label_space: str = setting(
        "met", "classes the loss competes over: met by the client, or all seen", choices=("met", "seen")
    )
    temperature: float = setting(0.1, "divisor of the logits in training", low=1e-3)
    rehearse: float = setting(0.01, "weight of the head's loss on pseudo-features", low=0.0)
    contrast: float = setting(0.01, "weight of the contrastive loss", low=0.0)
    quota: int = setting(20, "pseudo-features per prototyped class, client and local epoch", low=1)
    prototypes: int = setting(1, "prototypes kept of a class", low=1)
    inertia: float = setting(0.5, "share of the old global model in the new one", low=0.0, high=1.0)
    rate: float = setting(0.1, "share of fresh reports in a prototype that exists already", low=0.0, high=1.0)


class FedSpace(Method):
    """FedSpace."""

    Params = FedSpaceParams
    kinds = frozenset({"model", "prototype"})
    regimes: ClassVar = {"expanded": {"quota": 100, "prototypes": 5}}

    def begin(self, weights: Weights) -> ServerState:
        like = weights["adapter"]["scale"]
        radius = Block("prototype", {"radius": like.new_zeros(())})
        return super().begin(weights).put(prototypes=no_prototypes(like), radius=radius)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return (*MODEL, "prototypes", "radius")

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        own = acquainted(client)
        fit = client.train("fit", weights_of(inbox), MODEL, self.fit_loss)
        fit = replace(fit, constants=self.context(client, inbox, own["met"]))
        done = yield fit
        z = Tail(done.weights["adapter"], {}).adapt(client.features(done.weights["base"]))
        sent = {"prototypes": report(z, client.y_list, self.params.prototypes)}
        if int(own["first"]) == client.when.position:
            radius, count = radius_of(moments_of_rows(z, client.rank, client.labels, radius=True))
            sent["radius"] = Block("prototype", {"radius": radius, "count": count})
        answer = reply(client, done.weights, MODEL, loss=done.loss, **sent)
        known = set(inbox["prototypes"].labels)
        drawn = steps_of(client) * len(fit.constants["place"]) * len(known - set(client.labels)) / max(1, len(known))
        return replace(with_replay(client, answer, fit.epochs, self.params.quota, drawn), private=own)

    def context(self, client: Client, inbox: Inbox, met: Tensor) -> Tensors:
        """What the loss needs to know besides its batch. `place` deals one step's pseudo-features out to classes."""
        rows, known = tables(inbox["prototypes"], client.net.classes, self.params.prototypes)
        labels = sorted(set(inbox["prototypes"].labels))
        count = -(-self.params.quota * len(labels) // steps_of(client))
        ids = to_device(torch.tensor(labels, dtype=torch.long), known.device)
        return {
            "allowed": met if self.params.label_space == "met" else client.allowed(client.seen),
            "rehearsed": met | known,
            "old": known & ~client.allowed(client.labels),
            "labels": ids,
            "mean": rows[ids],
            "radius": inbox["radius"].tensors["radius"],
            "place": torch.arange(count, device=known.device) % max(1, len(labels)),
        }

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        p, y, tail = self.params, batch["y"], net.tail
        z = tail.adapt(net.base(*net.weak(batch["inputs"], batch["rng"])))
        loss = cross_entropy(tail.score(z) / p.temperature, y, batch["allowed"])
        if not len(batch["place"]):  # nobody has reported a prototype yet
            return loss
        pseudo, of = imagined(batch)
        each = cross_entropy(tail.score(pseudo)[:, None] / p.temperature, of[:, None], batch["rehearsed"])
        old = batch["old"][of]
        rehearsal = (each * old).sum() / old.sum().clamp(min=1)
        return loss + p.rehearse * rehearsal + p.contrast * contrastive(z, y, pseudo, of)

    # -- the server -------------------------------------------------------------------------------------------------

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        if not replies:
            return state
        old, keep = state.weights(), self.params.inertia
        state = super().aggregate(state, replies, when)
        mixed = {b: {k: keep * old[b][k] + (1 - keep) * t for k, t in ts.items()} for b, ts in state.weights().items()}
        reports = [r.blocks["prototypes"] for r in replies]
        bank = merge(state.blocks["prototypes"], reports, self.params.rate, self.params.prototypes)
        state = state.put_weights(mixed).put(prototypes=bank)
        measured = {f"{RADIUS}{r.client}": r.blocks["radius"] for r in replies if "radius" in r.blocks}
        if not measured:
            return state
        state = state.put(**measured)
        return state.put(radius=mean_radius(state))

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"prototypes": (class_means(state.blocks["prototypes"]), net.tail.adapt)}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        bank, radius = state.blocks["prototypes"], state.blocks["radius"].tensors["radius"]
        if label not in bank.labels:
            return None
        mean = rows_of(bank, label)
        mean = mean[torch.arange(count, device=mean.device) % len(mean)]
        noise = torch.randn(mean.shape, generator=rng, device=mean.device)
        return Samples("adapted", (mean + radius * noise,))


def acquainted(client: Client) -> Tensors:
    """The client's private state: the classes it has met, with the current ones, and its first position."""
    own, now = dict(client.private or {}), client.allowed(client.labels)
    met = client.keep(own["met"] | now if own else now)
    return {"met": met, "first": own.get("first", torch.tensor(client.when.position))}


def steps_of(client: Client) -> int:
    """Steps of an epoch on the current examples."""
    batch = client.settings.batch or len(client.current)
    return -(-len(client.current) // batch)


def radius_of(moments: Moments) -> tuple[Tensor, Tensor]:
    """ρ = √(mean_y tr(Σ_y)/d) over classes with at least two examples, and how many examples these are. One example
    has no spread; where no class has more, both are 0."""
    found = bank_from_moments(moments)
    several = found.count > 1
    each = found.spread.square().sum(1)
    variance = torch.where(several, each, 0.0).sum() / several.sum().clamp(min=1)
    return variance.sqrt(), torch.where(several, found.count, 0).sum(dtype=torch.int32)


def mean_radius(state: ServerState) -> Block:
    """The example-weighted mean over all who have ever measured it, each counted once."""
    told = [state.blocks[name].tensors for name in sorted(state.blocks) if name.startswith(RADIUS)]
    radius, count = (torch.stack([t[k] for t in told]) for k in ("radius", "count"))
    return Block("prototype", {"radius": (radius * count).sum() / count.sum().clamp(min=1)})


def imagined(batch: Batch) -> tuple[Tensor, Tensor]:
    """One step's pseudo-features and their class ids, the classes dealt out evenly in a fresh order, each around one
    of its prototypes."""
    mean, rng = batch["mean"], batch["rng"]
    order = torch.rand(len(mean), generator=rng, device=mean.device).argsort()
    row = order[batch["place"]]
    which = torch.randint(mean.shape[1], row.shape, generator=rng, device=mean.device)
    noise = torch.randn(len(row), mean.shape[2], generator=rng, device=mean.device)
    return mean[row, which] + batch["radius"] * noise, batch["labels"][row]


def contrastive(z: Tensor, y: Tensor, pseudo: Tensor, of: Tensor) -> Tensor:
    """Supervised contrastive loss at temperature 1: each real feature finds those of its class, real or pseudo, among
    all others; one that is alone in its class adds nothing."""
    points, labels = F.normalize(torch.cat([z, pseudo]), dim=1), torch.cat([y, of])
    itself = torch.eye(len(z), len(points), dtype=torch.bool, device=z.device)
    similarity = points[: len(z)] @ points.T
    log_share = similarity - similarity.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    friends = (y[:, None] == labels) & ~itself
    return -((log_share * friends).sum(1) / friends.sum(1).clamp(min=1)).mean()


METHOD = FedSpace
