"""FedSeIT (Chaudhary et al., Findings of EMNLP 2022): text classification with selective inter-client transfer.

Kept: each filter bank of the TextCNN is θ = B ⊙ sigmoid(m) + A, with B shared and averaged, and a gate m and a sparse
adaptive A for each task of each client. The client's loss is CE + λ₁‖A‖₁ + λ₂ Σ_i ½‖B⊙σ(m_i) + A_i − θ*_i‖² over its
past tasks. The server keeps every A (entries beyond 1e-3) and what its task is about: up to 200 centroids of
documents, a document being the mean of its word vectors. A client gets the up to 3 foreign adaptives whose tasks are
most like its own, by the mean of cos·1[cos > 0.7] over pairs of centroids; they are frozen, each is convolved by
itself, scaled by a trainable α that starts at its share of the scores, and joins the local features by a projection.

Stored: on the server gates, sparse adaptives and topic centroids of every client's tasks, and the deployed model
beside the shared parts; on a client gates, adaptives and foreign projection of its latest task, the filters it came
to, one quadratic for the tasks before, and within a position the foreign adaptives as they were sent.

Adapted: the original has a head for each task and is told the task; here there is one head, averaged, and
`label_space = "local"`, the softmax over the client's current classes, stands for a task's own head. Words are the
warm-up's and frozen, as the original's word vectors are; `trained` is the alternative. The gate starts at 4/5, as A
starts at B/5: so a task starts at B. Features keep their size, so concatenation became an addition of the projected
part. A client tells of its task in its first turn of a position and has foreign adaptives from its next one on, of
other clients' earlier positions only, so that they stay the same all position long and travel once. m_i, A_i and θ*_i
of past tasks are fixed, where the original still trains m_i and A_i: that serves personalised use, and for B it only
weakens the brake, which λ₂ sets. So a client keeps one quadratic of B instead of one term for each task. The run's
weight decay stands for the small L2 term. k-means replaces k-medoids. A that is more than half full travels whole.

Reported is the GLOBAL variant: one model with B, the shared head, and the mean over this position's participants of
sigmoid(m) and A folded into its filters (`deploy = "all"`: over all tasks told of so far). Foreign branches belong to
clients and are not in it. A personalised evaluation would give each client B with its own m, A and foreign branch of
the task in question; it is the better one, since what A_i knows of task i leaves the global model with the position.

Uncertain: with few texts a task has no more documents than centroids, and each document's vector is sent, as in the
original; lower `centroids` where that is too much. With few steps a task, A hardly becomes sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.config import setting
from profcil.data.bundle import Inputs
from profcil.encoders.textcnn import TextCNN
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.methods.base import Method, Params, reply
from profcil.methods.parts import banks
from profcil.methods.parts.banks import banks_of, named, parameters_of, part
from profcil.methods.parts.sparse import pack, unpack
from profcil.methods.parts.topics import centroids, documents, likeness
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tensors, Weights
from profcil.randomness import torch_generator

TASK = ("gate", "adaptive", "strength", "mix")  # what a client trains for one task alone
HELD = ("hold", "centre")  # what it keeps of its past tasks


@dataclass(frozen=True)
class FedSeITParams(Params):
    """Settings of FedSeIT."""

    label_space: str = setting(
        "local", "classes the training loss competes over: local ones, or all seen", choices=("local", "seen")
    )
    words: str = setting("frozen", "word vectors after the warm-up", choices=("frozen", "trained"))
    sparsity: float = setting(1e-3, "λ₁: weight of the adaptives' absolute values", low=0.0)
    drift: float = setting(1.0, "λ₂: weight of what moving B does to the client's past tasks", low=0.0)
    prune: float = setting(1e-3, "entries of an adaptive up to this size are not sent", low=0.0)
    top: int = setting(3, "foreign adaptives that a client uses at most", low=0)
    threshold: float = setting(0.7, "cosine up to which two centroids count as unlike", low=-1.0, high=1.0)
    centroids: int = setting(200, "points at most that stand for a task's texts", low=1)
    deploy: str = setting(
        "current", "tasks whose θ the global model is the mean of: this position's, or all", choices=("current", "all")
    )


class FedSeIT(Method):
    """FedSeIT."""

    Params = FedSeITParams
    modalities = frozenset({"text"})
    kinds = frozenset({"model", "memory", "statistics"})

    @classmethod
    def misfit(cls, net: Net) -> str:
        fits = isinstance(net.base, TextCNN)
        return super().misfit(net) or ("" if fits else "FedSeIT splits the filters of a TextCNN; set encoder=textcnn")

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        banks.attach(net, self.params.top)

    def begin(self, weights: Weights) -> ServerState:
        """`base` is what is deployed and judged, and never sent: clients get its parts, `words` and `shared`."""
        words = {k: t for k, t in weights["base"].items() if k.startswith("embedding.")}
        shared = {k: t for k, t in weights["base"].items() if k not in words}
        return super().begin({b: weights[b] for b in MODEL} | {"words": words, "shared": shared})

    def broadcast_to(self, client: int, state: ServerState, when: When) -> Sequence[str]:
        chosen = f"chosen/{client}/{when.position}"
        more = (chosen, *adaptives(state.blocks[chosen])) if chosen in state.blocks else ()
        return ("words", "shared", "adapter", "head", *more)

    @property
    def averaged(self) -> tuple[str, ...]:
        return (*(("words",) if self.params.words == "trained" else ()), "shared", "adapter", "head")

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        own = opened(client, inbox, self.params.top)
        task, held = ({k: t for k, t in own.items() if k.split(".")[0] in names} for names in (TASK, HELD))
        fit = client.train("fit", {**weights_of(inbox), "task": task}, (*self.averaged, "task"), self.fit_loss)
        allowed = client.allowed(self.label_space(client, inbox))
        others = named("foreign", [client.keep(t) for t in foreign(client, inbox)])
        done = yield replace(fit, constants={"allowed": allowed, **held, **others})
        own |= {**done.weights["task"], **named("bank", banks_of(done.weights["shared"]))}
        private = {k: client.keep(t) for k, t in own.items()}
        sent = {"adaptive": self.adaptive(own)} | ({"topic": self.topic(client, inbox)} if arrives(client) else {})
        return replace(reply(client, done.weights, self.averaged, loss=done.loss, **sent), private=private)

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        (tokens,) = net.weak(batch["inputs"], batch["rng"])
        u = banks.features(net, tokens, part(batch, "foreign"))
        loss = cross_entropy(net.classify(u), batch["y"], batch["allowed"])
        sparse = torch.stack([a.abs().sum() for a in part(parameters_of(net, "task"), "adaptive")]).sum()
        moved = banks.drift(banks_of(parameters_of(net, "shared")), part(batch, "hold"), part(batch, "centre"))
        return loss + self.params.sparsity * sparse + self.params.drift * moved

    def adaptive(self, own: Tensors) -> Block:
        """What is told of a task: the gates, and the entries of A that count."""
        large = pack(named("adaptive", part(own, "adaptive")), self.params.prune)
        return Block("memory", {**named("gate", part(own, "gate")), **large})

    def topic(self, client: Client, inbox: Inbox) -> Block:
        """What the task is about: a few points among the word vectors."""
        (tokens,) = client.examples.inputs(client.current)
        texts = documents(inbox["words"].tensors["embedding.weight"], tokens)
        rng = torch_generator(client.number("topic"))
        return Block("statistics", {"centroids": centroids(texts, self.params.centroids, rng)})

    # -- the server -------------------------------------------------------------------------------------------------

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg of the shared parts; a participant's adaptive replaces the one it has sent before for this task."""
        fresh: dict[str, Block] = {}
        for r in replies:
            at = (r.client, when.position)
            fresh[name("adaptive", at)] = r.blocks["adaptive"]
            if "topic" in r.blocks:
                points, count = r.blocks["topic"].tensors["centroids"], torch.tensor(r.samples)
                fresh[name("topic", at)] = Block("statistics", {"centroids": points, "count": count})
                fresh[name("chosen", at)] = self.choose(state, points, at)
        return super().aggregate(state, replies, when).put(**fresh) if fresh else state

    def choose(self, state: ServerState, points: Tensor, at: tuple[int, int]) -> Block:
        """The tasks of others at earlier positions that are most like this one; none that is unlike altogether."""
        others = [other for other in tasks(state) if other[0] != at[0] and other[1] < at[1]]
        told = [state.blocks[name("topic", other)].tensors["centroids"] for other in others]
        score = torch.stack([points.new_zeros(()), *(likeness(points, t, self.params.threshold) for t in told)])[1:]
        best = score.argsort(descending=True, stable=True)[: self.params.top]
        best = best[score[best] > 0]
        where = torch.tensor(others, dtype=torch.int32, device=score.device).view(-1, 2)
        return Block("memory", {"task": where[best], "score": score[best]})

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """The global model: the mean of θ_i = B ⊙ sigmoid(m_i) + A_i over tasks, weighted by their examples."""
        counted = [at for at in tasks(state) if self.params.deploy == "all" or at[1] == when.position]
        shared, words = state.weights()["shared"], state.weights()["words"]
        if not counted:
            return state
        share = torch.stack([state.blocks[name("topic", at)].tensors["count"] for at in counted]).double()
        gates, adaptives = mean(
            [state.blocks[name("adaptive", at)] for at in counted], (share / share.sum()).tolist(), banks_of(shared)
        )
        folded = banks.compose(banks_of(shared), gates, adaptives)
        theta = {f"convolutions.{i}.weight": t for i, t in enumerate(folded)}
        return state.put_weights({"base": {**words, **shared, **theta}})


# -- what a client keeps ----------------------------------------------------------------------------------------------


def arrives(client: Client) -> bool:
    """Whether this is the client's first turn in this position."""
    return not client.private or int(client.private["position"]) != client.when.position


def opened(client: Client, inbox: Inbox, top: int) -> Tensors:
    """The client's own tensors for this turn: a fresh task where it arrives; α starts at the scores' shares."""
    own, shared = dict(client.private or {}), inbox["shared"].tensors
    if arrives(client):
        position = torch.tensor(client.when.position)
        own = {"position": position, **banks.add_finished_task(own, banks_of(shared)), **banks.fresh_task(shared, top)}
    chosen = inbox.get(name("chosen", (client.id, client.when.position)))
    if chosen is not None and not own["strength.0"].any():
        score = chosen.tensors["score"]
        own["strength.0"] = torch.zeros_like(own["strength.0"]).index_copy(
            0, torch.arange(len(score), device=score.device), score / score.sum()
        )
    return own


def foreign(client: Client, inbox: Inbox) -> list[Tensor]:
    """The adaptives that the server has chosen for this client, stacked for each width; perhaps none."""
    chosen, like = inbox.get(name("chosen", (client.id, client.when.position))), banks_of(inbox["shared"].tensors)
    sent = [dense(inbox[n], like) for n in adaptives(chosen)] if chosen is not None else []
    return [torch.stack([b, *(s[i] for s in sent)])[1:] for i, b in enumerate(like)]


# -- what the server stores -------------------------------------------------------------------------------------------


def name(what: str, at: tuple[int, int]) -> str:
    """The block about the task that a client has at a position."""
    return f"{what}/{at[0]}/{at[1]}"


def tasks(state: ServerState) -> list[tuple[int, int]]:
    """All that clients have told of, in order."""
    found = [n.split("/") for n in state.blocks if n.startswith("topic/")]
    return sorted((int(client), int(position)) for _, client, position in found)


def adaptives(chosen: Block) -> list[str]:
    return [name("adaptive", tuple(at)) for at in chosen.tensors["task"].tolist()]


def dense(adaptive: Block, like: Sequence[Tensor]) -> list[Tensor]:
    """A again, zero where it was too small to send."""
    return part(unpack(adaptive.tensors, named("adaptive", like)), "adaptive")


def mean(blocks: Sequence[Block], shares: Sequence[float], like: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The weighted means of the open gates and of the adaptives, for each width."""
    gates, sums = [b.new_zeros(len(b)) for b in like], [torch.zeros_like(b) for b in like]
    for block, share in zip(blocks, shares, strict=True):
        torch._foreach_add_(gates, [m.sigmoid() for m in part(block.tensors, "gate")], alpha=share)
        torch._foreach_add_(sums, dense(block, like), alpha=share)
    return gates, sums


METHOD = FedSeIT
