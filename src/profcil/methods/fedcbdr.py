"""FedCBDR (Qi et al., NeurIPS 2025): real exemplars chosen by global leverage, and task-aware temperatures.

Kept: after a position's last round, participants send rotated features XQ of their current examples under the global
model; the server stacks them, takes leverage scores from one economy SVD, draws examples in proportion to them, and
tells each client which of its own to keep. Raw examples never leave a client. Training on current and replayed
examples minimises (ω_old/N_old) Σ_replayed CE + (ω_new/N_new) Σ_current CE, both over [z_old/τ_old, z_new/τ_new], with
the paper's best values. N counts an epoch, so a batch is an unbiased sample of that sum.

Stored: on the server a count per class, and row numbers of the chosen examples until their client has them; on a
client raw examples, up to B of a class.

Adapted to client-specific orders: `old` are the classes seen by the federation that are not current for this client.
A client without exemplars trains by plain cross-entropy, as in the paper's first task. The chosen row numbers reach a
client with its next broadcast, and only that client; it keeps them as private state, and the server has them until a
reply of that client shows that it does. The budget is per class, not
per task: `storage = "client"` keeps up to B examples of a class on each client, `"federation"` B over all clients and
positions, first come, first served. Every local epoch replays exactly B examples of each class that the client has
stored, repeated where it has fewer. So classes are balanced by quota, where the paper balances only implicitly; the
server sees a label for each feature row for that. Draws are without replacement: a second copy of an example would
cost its place and add nothing. The features are z, before the head.

Left out: the private rotation P_k. Undoing it takes one more exchange (the client's rows of U down, its scores up)
and yields the same scores, as a test shows; the ledger shows what is really sent, features, row numbers and labels up
and row numbers down. Without P_k the server sees inner products between examples. The sketching weights 1/√(n p) are
left out too, as the paper's loss does not use them. Public code in circulation decomposes each client alone and never
undoes P_k: not repeated.

Uncertain: the paper lets all clients take part in every round. Here only participants of a position's last round are
asked, so a client that is not drawn then keeps nothing of that position. ω and τ are untuned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from profcil.config import setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Train, Turn
from profcil.methods.base import Method, Params, Samples, reply, with_replay
from profcil.methods.parts.exemplars import Replay, draw, leverages, rotation, together
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Tensors, Weights
from profcil.randomness import torch_generator


@dataclass(frozen=True)
class FedCBDRParams(Params):
    """Settings of FedCBDR."""

    budget: int = setting(20, "B: exemplars replayed per old class, client and local epoch; 0 = no replay", low=0)
    storage: str = setting(
        "client", "who may store B examples of a class: each client, or all together", choices=("client", "federation")
    )
    weight_old: float = setting(1.1, "ω_old: weight of replayed examples", low=0.0)
    weight_new: float = setting(0.9, "ω_new: weight of current examples", low=0.0)
    temperature_old: float = setting(0.9, "τ_old: divisor of the logits of old classes", low=1e-3)
    temperature_new: float = setting(1.1, "τ_new: divisor of the logits of current classes", low=1e-3)


class FedCBDR(Method):
    """FedCBDR."""

    Params = FedCBDRParams
    kinds = frozenset({"model", "replay"})
    regimes: ClassVar = {"expanded": {"budget": 100}}

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        net.attach("seed", own_seed(generator))

    # -- the client's turn ------------------------------------------------------------------------------------------

    def broadcast_to(self, client: int, state: ServerState, when: When) -> Sequence[str]:
        return (*self.broadcast(state, when), keep_for(client))

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        rows, source = client.once("replay", lambda: self.source(client, inbox))
        client.keep(client.examples.inputs(rows)[0][: len(rows)])  # raw examples; of a graph, as many nodes' features
        fit = self.fit(client, inbox, source)
        done = yield fit
        answer = reply(client, done.weights, MODEL, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed)
        return replace(answer, private={"rows": rows})

    def source(self, client: Client, inbox: Inbox) -> tuple[Tensor, Replay]:
        """The client's exemplars, which stay the same while a position lasts, and epochs with those of old classes."""
        rows, y = kept_rows(client, inbox), client.examples.y
        old = rows[~client.allowed(client.labels)[y[rows]]]
        return rows, Replay(client.current, old, y, self.params.budget)

    def fit(self, client: Client, inbox: Inbox, source: Replay) -> Train:
        allowed = client.allowed(self.label_space(client, inbox))
        allowed = allowed.index_fill(0, source.y[source.stored], True)  # replayed ones compete in any label space
        if not source.replayed:
            return client.train("fit", weights_of(inbox), MODEL, self.fit_loss, allowed=allowed)
        fit = client.train("fit", weights_of(inbox), MODEL, self.balanced_loss, source)
        return replace(
            fit, inputs=client.examples.inputs, constants={"allowed": allowed, **self.scales(client, source)}
        )

    def scales(self, client: Client, source: Replay) -> Tensors:
        """Every class's temperature, and the weight of its examples in an epoch's mean."""
        p, new = self.params, client.allowed(client.labels)
        weight_old, weight_new = p.weight_old / source.replayed, p.weight_new / len(client.current)
        ones = torch.ones(len(new), device=new.device)
        return {
            "temperature": torch.where(new, p.temperature_new * ones, p.temperature_old * ones),
            "weight": torch.where(new, weight_new * ones, weight_old * ones) * source.size,
        }

    def balanced_loss(self, net: Net, batch: Batch) -> Tensor:
        y = batch["y"]
        logits = net(*net.weak(batch["inputs"], batch["rng"])) / batch["temperature"]
        each = cross_entropy(logits[:, None], y[:, None], batch["allowed"])
        return (batch["weight"][y] * each).mean()

    # -- choosing exemplars -----------------------------------------------------------------------------------------

    def surveys(self, when: When) -> bool:
        return when.final and self.params.budget > 0

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("base", "adapter")

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Rotated features, each with the number and the label of its example. The server does not know Q."""
        z = Tail(inbox["adapter"].tensors, {}).adapt(client.features(inbox["base"]))
        q = rotation(z.shape[1], torch_generator(client.seed, "rotation", client.when.position))
        tensors = {"features": z @ client.tensor(q), "rows": client.current}
        candidates = Block("replay", tensors, tuple(client.y_list))
        return Reply(client.id, len(client.current), {"candidates": candidates})

    def begin(self, weights: Weights) -> ServerState:
        """The server's own seed is no part of the model: it is neither sent nor trained."""
        head = weights["head"]["weight"]
        count = torch.zeros(len(head), dtype=torch.long, device=head.device)
        state = super().begin({b: weights[b] for b in MODEL})
        return state.put(stored=Block("replay", {"count": count}), seed=Block("replay", weights["seed"]))

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """The average; whoever has replied holds its picks, so they need not be sent again."""
        return super().aggregate(state, replies, when).drop(*(keep_for(r.client) for r in replies))

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Each client's picks, in a block of its own; `stored` counts the exemplars of every class."""
        if not replies:
            return state
        told = [r.blocks["candidates"] for r in replies]
        scores = leverages(torch.cat([b.tensors["features"] for b in told]))
        y = torch.tensor([label for b in told for label in b.labels], device=scores.device)
        sizes = [len(b.labels) for b in told]
        stored = state.blocks["stored"].tensors["count"]
        chosen = self.choose(scores, y, sizes, state, when)
        picks = {
            keep_for(r.client): Block(
                "replay", {"rows": torch.cat([b.tensors["rows"][part], *waiting(state, r.client)])}
            )
            for r, b, part in zip(replies, told, chosen.split(sizes), strict=True)
        }
        count = stored + torch.bincount(y[chosen], minlength=len(stored))
        return state.put(**picks, stored=Block("replay", {"count": count}))

    def choose(self, scores: Tensor, y: Tensor, sizes: Sequence[int], state: ServerState, when: When) -> Tensor:
        """Which of the stacked examples are kept: up to B of every class on each client, or over all of them."""
        p, chosen = self.params, torch.zeros(len(y), dtype=torch.bool, device=y.device)
        stored, seed = state.blocks["stored"].tensors["count"], int(state.blocks["seed"].tensors["number"])
        shared = p.storage == "federation"
        for group, rows in enumerate(torch.arange(len(y), device=y.device).split([len(y)] if shared else list(sizes))):
            for label in torch.unique(y[rows]).tolist():
                of_class = rows[y[rows] == label]
                room = max(0, p.budget - int(stored[label])) if shared else p.budget
                rng = torch_generator(seed, "exemplars", when.position, group, label)
                chosen[of_class[draw(scores[of_class], room, rng)]] = True
        return chosen

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Stored examples of the class, wherever they are stored; at most as many as there are."""
        kept = [kept_rows(c, state.blocks) for c in clients]
        rows = [r[c.examples.y[r] == label] for c, r in zip(clients, kept, strict=True)]
        sizes = [len(r) for r in rows]
        if not any(sizes):
            return None
        drawn = torch.randperm(sum(sizes), generator=rng, device=rng.device) < count
        parts = [(c, r[mine]) for c, r, mine in zip(clients, rows, drawn.split(sizes), strict=True)]
        return Samples("inputs", together([c.examples.inputs(r) for c, r in parts if len(r)]))


def own_seed(generator: torch.Generator) -> nn.Module:
    """The number that the server's draws start from, as a block without anything to train."""
    module = nn.Module()
    module.register_buffer("number", torch.randint(2**62, (), generator=generator))
    return module


def keep_for(client: int) -> str:
    """The name of the block that tells a client what to keep."""
    return f"keep/{client}"


def waiting(state: ServerState, client: int) -> list[Tensor]:
    """Picks of earlier surveys that the client has not confirmed by a reply, as when its turns were refused."""
    held = state.get(keep_for(client))
    return [held.tensors["rows"]] if held else []


def kept_rows(client: Client, inbox: Inbox) -> Tensor:
    """The client's exemplars as rows of its own examples: those it had, and those it has just been told to keep."""
    had = [client.private["rows"]] if client.private else []
    told = [inbox[keep_for(client.id)].tensors["rows"]] if keep_for(client.id) in inbox else []
    return torch.unique(torch.cat([client.current[:0], *had, *told]))


METHOD = FedCBDR
