r"""FedSpace (Shenaj et al., CVPR Workshops 2023): asynchronous federated class-incremental learning with prototypes.

Kept: every client has its own task order. The client's loss has three terms: CE(logits/0.1) over the classes it has
met; 0.01·CE of the head on pseudo-features p̃ = C_y + ρ·N(0, 1) of classes that have a prototype and are not current;
0.01·a supervised contrastive loss (temperature 1) on normalised features and pseudo-features. The server halves each
step, w ← 0.5·average + 0.5·old, and moves prototypes by 0.1 towards the count-weighted mean of the round's reports. The
radius ρ² = mean_y tr(Σ_y)/d is measured in a client's first position only, over the classes of which it has at least
two examples; ρ is the example-weighted mean over all clients that have reported so far, each by its latest report.

Loss: $`\mathcal{L} = \mathrm{CE}_M(f_w(x) / t, y) + \alpha \, \mathrm{CE}_{M \cup P}(h_w(\tilde{p}) / t, \tilde{y}) +
\beta \, \mathrm{SupCon}(z, \tilde{p})`$ with classes $`M`$ that the client has met, classes $`P`$ with a prototype, and
pseudo-features $`\tilde{p} = p_{\tilde{y}} + \rho \varepsilon`$; $`\alpha`$ = `rehearse`, $`\beta`$ = `contrast`.

Choose it when: clients have orders of their own and only prototypes may be stored. It is strong on severe CLINC150 and
weak elsewhere.

Stored: on the server the prototypes of every class and a radius of every client; on a client which classes it has met.

Adapted: prototypes and pseudo-features are in the space of z, before the one global head; the shared warm-up replaces
the fractal pre-training. The bank persists: the released code drops every class that is absent in a round. The classes
that a client has met are its private state, updated when it participates. The pseudo-feature loss competes over classes
that were met or have a prototype, not over untrained rows of the head. The budget is `quota` pseudo-features per class
with a prototype and epoch, spread evenly over steps and classes (exact per epoch up to rounding to whole steps, per
class in expectation), and both losses use the same samples. The expanded regime has a quota of 100 and five prototypes
a class (k-means centres; the authors have a queue of past prototypes), used in turn. Only real features are contrastive
anchors, since anchors among pseudo-features would cost (quota·classes)² similarities, and an anchor is not compared
with itself.

Left out: the four rotations as extra labels. They quadruple the cost of a step and mean nothing for text and graphs;
this is the rotation-free variant for every modality.

Uncertain: the weights and the temperature were the authors' choice for Adam at 1e-3 over 5000 rounds. With ten rounds a
position a rehearsal weight of 0.01 has almost no effect: on digits (validation seeds) it takes 30 to 300 to preserve
old classes. Prototypes of absent classes are never updated, so they become outdated when the base moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import Checked, setting
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Turn
from profcil.memory.bank import Moments, bank_from_moments, moments_of_rows
from profcil.methods.base import Method, Samples, reply, with_replay
from profcil.methods.parts.prototypes import class_means, merge, no_prototypes, report, rows_of, tables
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Tensors, Weights

RADIUS = "radius/"  # prefix of the blocks with the radius of each client; the client's id follows


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
    prototypes: int = setting(1, "prototypes stored of a class", low=1)
    inertia: float = setting(0.5, "weight of the old global model in the new one", low=0.0, high=1.0)
    rate: float = setting(0.1, "weight of new reports in an existing prototype", low=0.0, high=1.0)


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
        private = update_private(client)
        fit = client.train("fit", weights_of(inbox), MODEL, self.fit_loss)
        fit = replace(fit, constants=self.constants(client, inbox, private["met"]))
        done = yield fit
        tail = Tail(done.weights["adapter"], {})
        z = tail.adapt(client.features(done.weights["base"]))
        sent = {"prototypes": report(z, client.y_list, self.params.prototypes)}
        if int(private["first"]) == client.when.position:
            moments = moments_of_rows(z, client.rank, client.labels, radius=True)
            radius, count = radius_of(moments)
            sent["radius"] = Block("prototype", {"radius": radius, "count": count})
        answer = reply(client, done.weights, MODEL, loss=done.loss, **sent)
        known = set(inbox["prototypes"].labels)
        old = known - set(client.labels)
        per_epoch = steps_per_epoch(client) * len(fit.constants["place"])
        divisor = max(1, len(known))
        served = per_epoch * len(old) / divisor
        answer = with_replay(client, answer, fit.epochs, self.params.quota, served)
        return replace(answer, private=private)

    def constants(self, client: Client, inbox: Inbox, met: Tensor) -> Tensors:
        """What the loss needs besides its batch. `place` assigns the pseudo-features of one step to classes."""
        rows, known = tables(inbox["prototypes"], client.net.classes, self.params.prototypes)
        labels = sorted(set(inbox["prototypes"].labels))
        per_epoch = self.params.quota * len(labels)
        count = ceil(per_epoch / steps_per_epoch(client))
        ids = torch.tensor(labels, dtype=torch.long, device=known.device)
        allowed = met if self.params.label_space == "met" else client.allowed(client.seen)
        old = known & ~client.allowed(client.labels)
        number = torch.arange(count, device=known.device)
        place = number % max(1, len(labels))
        return {
            "allowed": allowed,
            "rehearsed": met | known,
            "old": old,
            "labels": ids,
            "mean": rows[ids],
            "radius": inbox["radius"].tensors["radius"],
            "place": place,
        }

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        params = self.params
        y = batch["y"]
        tail = net.tail
        inputs = net.weak(batch["inputs"], batch["rng"])
        z = tail.adapt(net.base(*inputs))
        logits = tail.score(z) / params.temperature
        loss = cross_entropy(logits, y, batch["allowed"])
        if not len(batch["place"]):  # no prototype has been reported yet
            return loss
        pseudo, pseudo_y = sample_pseudo_features(batch)
        pseudo_logits = tail.score(pseudo)[:, None] / params.temperature
        each = cross_entropy(pseudo_logits, pseudo_y[:, None], batch["rehearsed"])
        old = batch["old"][pseudo_y]
        number = old.sum().clamp(min=1)
        rehearsal = (each * old).sum() / number
        contrast = contrastive(z, y, pseudo, pseudo_y)
        total: Tensor = loss + params.rehearse * rehearsal + params.contrast * contrast
        return total

    # -- the server -------------------------------------------------------------------------------------------------

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        if not replies:
            return state
        old_weights = state.weights()
        state = super().aggregate(state, replies, when)
        mixed = mix(old_weights, state.weights(), self.params.inertia)
        reports = [r.blocks["prototypes"] for r in replies]
        bank = merge(state.blocks["prototypes"], reports, self.params.rate, self.params.prototypes)
        state = state.put_weights(mixed).put(prototypes=bank)
        measured = {}
        for r in replies:
            if "radius" in r.blocks:
                measured[f"{RADIUS}{r.client}"] = r.blocks["radius"]
        if not measured:
            return state
        state = state.put(**measured)
        return state.put(radius=mean_radius(state))

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"prototypes": (class_means(state.blocks["prototypes"]), net.tail.adapt)}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Samples around the prototypes of the class, with the global radius."""
        bank = state.blocks["prototypes"]
        radius = state.blocks["radius"].tensors["radius"]
        if label not in bank.labels:
            return None
        mean = rows_of(bank, label)
        number = torch.arange(count, device=mean.device)
        mean = mean[number % len(mean)]
        noise = torch.randn(mean.shape, generator=rng, device=mean.device)
        return Samples("adapted", (mean + radius * noise,))


def mix(old: Weights, new: Weights, inertia: float) -> Weights:
    """inertia · old + (1 − inertia) · new, for all blocks of `new`."""
    mixed: Weights = {}
    for block, tensors in new.items():
        mixed[block] = {}
        for name, t in tensors.items():
            mixed[block][name] = inertia * old[block][name] + (1 - inertia) * t
    return mixed


def update_private(client: Client) -> Tensors:
    """The client's private state: the classes it has met, including the current ones, and its first position."""
    current = client.allowed(client.labels)
    private = client.private
    if not private:
        return {"met": client.keep(current), "first": torch.tensor(client.when.position)}
    return {"met": client.keep(private["met"] | current), "first": private["first"]}


def steps_per_epoch(client: Client) -> int:
    """Steps of an epoch on the current examples."""
    batch = client.settings.batch or len(client.current)
    return ceil(len(client.current) / batch)


def radius_of(moments: Moments) -> tuple[Tensor, Tensor]:
    """ρ = √(mean_y tr(Σ_y)/d) over classes with at least two examples, and the number of these examples. A single
    example has no spread; if every class has only one, both are 0."""
    bank = bank_from_moments(moments)
    several = bank.count > 1
    each = bank.spread.square().sum(1)
    classes = several.sum().clamp(min=1)
    variance = torch.where(several, each, 0.0).sum() / classes
    examples = torch.where(several, bank.count, 0)
    return variance.sqrt(), examples.sum(dtype=torch.int32)


def mean_radius(state: ServerState) -> Block:
    """The example-weighted mean over all clients that have ever reported a radius, by the latest report of each."""
    reports = [state.blocks[name].tensors for name in sorted(state.blocks) if name.startswith(RADIUS)]
    radius = torch.stack([report["radius"] for report in reports])
    count = torch.stack([report["count"] for report in reports])
    total = count.sum().clamp(min=1)
    mean = (radius * count).sum() / total
    return Block("prototype", {"radius": mean})


def sample_pseudo_features(batch: Batch) -> tuple[Tensor, Tensor]:
    """The pseudo-features of one step and their class ids. Classes are used evenly, in a fresh random order, and each
    pseudo-feature is sampled around a random prototype of its class."""
    mean = batch["mean"]
    rng = batch["rng"]
    keys = torch.rand(len(mean), generator=rng, device=mean.device)
    order = keys.argsort()
    row = order[batch["place"]]
    prototype = torch.randint(mean.shape[1], row.shape, generator=rng, device=mean.device)
    noise = torch.randn(len(row), mean.shape[2], generator=rng, device=mean.device)
    features = mean[row, prototype] + batch["radius"] * noise
    return features, batch["labels"][row]


def contrastive(z: Tensor, y: Tensor, pseudo: Tensor, pseudo_y: Tensor) -> Tensor:
    """Supervised contrastive loss at temperature 1. Anchors are the real features. Positives are the real and pseudo-
    features of the same class; an anchor without positives adds nothing."""
    points = F.normalize(torch.cat([z, pseudo]), dim=1)
    labels = torch.cat([y, pseudo_y])
    itself = torch.eye(len(z), len(points), dtype=torch.bool, device=z.device)
    similarity = points[: len(z)] @ points.T
    others = similarity.masked_fill(itself, -torch.inf)
    log_total = others.logsumexp(1, keepdim=True)
    log_share = similarity - log_total
    positive = (y[:, None] == labels) & ~itself
    number = positive.sum(1).clamp(min=1)
    each = (log_share * positive).sum(1) / number
    return -each.mean()


METHOD = FedSpace
