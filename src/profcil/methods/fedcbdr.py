r"""FedCBDR (Qi et al., NeurIPS 2025): real exemplars chosen by global leverage, and task-aware temperatures.

Kept: after a position's last round, participants send rotated features XQ of their current examples under the global
model. The server stacks them, computes leverage scores from one economy SVD, draws examples in proportion to them, and
sends each client the rows of its examples to store. Raw examples never leave a client. Training on current and
replayed examples minimises (ω_old/N_old) Σ_replayed CE + (ω_new/N_new) Σ_current CE, both over
[z_old/τ_old, z_new/τ_new], with the paper's best values. N counts an epoch, so a batch is an unbiased sample of that
sum.

Loss: $`\mathcal{L} = \frac{\omega_o}{N_o} \sum_{i \in R} \mathrm{CE}_S(f_w(x_i) / \tau, y_i) + \frac{\omega_n}{N_n}
\sum_{i \in D} \mathrm{CE}_S(f_w(x_i) / \tau, y_i)`$ over replayed examples $`R`$ and current ones $`D`$; $`\tau`$ is
$`\tau_o`$ for the logits of old classes and $`\tau_n`$ for those of current ones.

Choose it when: clients may store raw examples. It is strong on homogeneous texts and graphs, and loses 12 to 37 points
on severe streams.

Stored: on the server a count per class, and row numbers of the chosen examples until their client has them; on a
client raw examples, up to B of a class.

Adapted to client-specific orders: `old` are the classes seen by the federation that are not current for this client.
A client without exemplars trains by plain cross-entropy, as in the paper's first task. The chosen row numbers are sent
to their client only, with its next broadcast. The client stores them as private state; the server stores them until a
reply of that client confirms them. The budget is per class, not per task: `storage = "client"` stores up to B examples
of a class on each client, `"federation"` B over all clients and positions, where earlier positions have precedence.
Every local epoch replays exactly B examples of each stored class, repeated if the client has fewer. So classes are
balanced by quota, where the paper balances only implicitly; for that the server receives a label with each feature
row. Draws are without replacement: a second copy of an example would use up budget and add nothing. The features are z,
before the head.

Left out: the private rotation P_k. Undoing it takes one more exchange (the client's rows of U down, its scores up)
and gives the same scores, as a test shows. The ledger counts what is really sent: features, row numbers and labels up,
and row numbers down. Without P_k the server learns inner products between examples. The sketching weights 1/√(n p) are
left out too, as the paper's loss does not use them. Public code in circulation decomposes each client alone and never
undoes P_k; this is not repeated here.

Uncertain: in the paper all clients participate in every round. Here only participants of a position's last round are
asked, so a client that is not drawn then stores nothing of that position. ω and τ are not tuned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from profcil.config import setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Train, Turn
from profcil.methods.base import Method, Params, Samples, reply, with_replay
from profcil.methods.parts.exemplars import ReplaySource, draw, join_inputs, leverages, rotation
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
        net.attach("seed", make_seed(generator))

    # -- the client's turn ------------------------------------------------------------------------------------------

    def broadcast_to(self, client: int, state: ServerState, when: When) -> Sequence[str]:
        return (*self.broadcast(state, when), picks_name(client))

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        rows, source = client.once("replay", lambda: self.source(client, inbox))
        # The memory of raw examples; for a graph, of the features of as many nodes.
        client.keep(client.examples.inputs(rows)[0][: len(rows)])
        fit = self.fit(client, inbox, source)
        done = yield fit
        answer = reply(client, done.weights, MODEL, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed)
        return replace(answer, private={"rows": rows})

    def source(self, client: Client, inbox: Inbox) -> tuple[Tensor, ReplaySource]:
        """The client's exemplars, which do not change within a position, and epochs that replay those of old
        classes."""
        rows = exemplar_rows(client, inbox)
        y = client.examples.y
        current = client.allowed(client.labels)
        old = rows[~current[y[rows]]]
        return rows, ReplaySource(client.current, old, y, self.params.budget)

    def fit(self, client: Client, inbox: Inbox, source: ReplaySource) -> Train:
        """The training phase: plain cross-entropy without exemplars, else the balanced loss."""
        weights = weights_of(inbox)
        allowed = source.allow_stored(client.allowed(self.label_space(client, inbox)))
        if not source.replayed:
            return client.train("fit", weights, MODEL, self.fit_loss, allowed=allowed)
        fit = client.train("fit", weights, MODEL, self.balanced_loss, source)
        constants = {"allowed": allowed, **self.scales(client, source)}
        return replace(fit, inputs=client.examples.inputs, constants=constants)

    def scales(self, client: Client, source: ReplaySource) -> Tensors:
        """For every class its temperature, and the weight of its examples in an epoch's mean."""
        params = self.params
        new = client.allowed(client.labels)
        weight_old = params.weight_old / source.replayed
        weight_new = params.weight_new / len(client.current)
        ones = torch.ones(len(new), device=new.device)
        temperature = torch.where(new, params.temperature_new * ones, params.temperature_old * ones)
        share = torch.where(new, weight_new * ones, weight_old * ones)
        return {"temperature": temperature, "weight": share * source.size}

    def balanced_loss(self, net: Net, batch: Batch) -> Tensor:
        y = batch["y"]
        inputs = net.weak(batch["inputs"], batch["rng"])
        logits = net(*inputs) / batch["temperature"]
        each = cross_entropy(logits[:, None], y[:, None], batch["allowed"])
        loss: Tensor = (batch["weight"][y] * each).mean()
        return loss

    # -- choosing exemplars -----------------------------------------------------------------------------------------

    def surveys(self, when: When) -> bool:
        return when.final and self.params.budget > 0

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("base", "adapter")

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Rotated features with the row number and the label of each example. The server does not know Q."""
        tail = Tail(inbox["adapter"].tensors, {})
        z = tail.adapt(client.features(inbox["base"]))
        rng = torch_generator(client.seed, "rotation", client.when.position)
        q = rotation(z.shape[1], rng)
        tensors = {"features": z @ client.tensor(q), "rows": client.current}
        candidates = Block("replay", tensors, tuple(client.y_list))
        return Reply(client.id, len(client.current), {"candidates": candidates})

    def begin(self, weights: Weights) -> ServerState:
        """The server's seed is not part of the model: it is neither sent nor trained."""
        head = weights["head"]["weight"]
        count = torch.zeros(len(head), dtype=torch.long, device=head.device)
        state = super().begin({b: weights[b] for b in MODEL})
        stored = Block("replay", {"count": count})
        seed = Block("replay", weights["seed"])
        return state.put(stored=stored, seed=seed)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg. A client that has replied holds its picks, so they need not be sent again."""
        confirmed = [picks_name(r.client) for r in replies]
        return super().aggregate(state, replies, when).drop(*confirmed)

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Stores the picks of each client in a block for this client; `stored` counts the exemplars of every class."""
        if not replies:
            return state
        candidates = [r.blocks["candidates"] for r in replies]
        features = torch.cat([b.tensors["features"] for b in candidates])
        scores = leverages(features)
        labels = [label for b in candidates for label in b.labels]
        y = torch.tensor(labels, device=scores.device)
        sizes = [len(b.labels) for b in candidates]
        chosen = self.choose(scores, y, sizes, state, when)
        picks = {}
        for r, block, part in zip(replies, candidates, chosen.split(sizes), strict=True):
            new_rows = block.tensors["rows"][part]
            rows = torch.cat([new_rows, *unconfirmed(state, r.client)])
            picks[picks_name(r.client)] = Block("replay", {"rows": rows})
        stored = state.blocks["stored"].tensors["count"]
        added = torch.bincount(y[chosen], minlength=len(stored))
        count = stored + added
        return state.put(**picks, stored=Block("replay", {"count": count}))

    def choose(self, scores: Tensor, y: Tensor, sizes: Sequence[int], state: ServerState, when: When) -> Tensor:
        """The mask of stacked examples that are stored: up to B of every class on each client, or over all clients."""
        budget = self.params.budget
        shared = self.params.storage == "federation"
        stored = state.blocks["stored"].tensors["count"]
        seed = int(state.blocks["seed"].tensors["number"])
        chosen = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        group_sizes = [len(y)] if shared else list(sizes)
        groups = torch.arange(len(y), device=y.device).split(group_sizes)
        for group, rows in enumerate(groups):
            for label in torch.unique(y[rows]).tolist():
                of_class = rows[y[rows] == label]
                count = max(0, budget - int(stored[label])) if shared else budget
                rng = torch_generator(seed, "exemplars", when.position, group, label)
                picks = draw(scores[of_class], count, rng)
                chosen[of_class[picks]] = True
        return chosen

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Stored examples of the class from all clients; at most as many as there are."""
        stored = [exemplar_rows(c, state.blocks) for c in clients]
        of_class = []
        for client, rows in zip(clients, stored, strict=True):
            is_class = client.examples.y[rows] == label
            of_class.append(rows[is_class])
        sizes = [len(rows) for rows in of_class]
        if not any(sizes):
            return None
        order = torch.randperm(sum(sizes), generator=rng, device=rng.device)
        drawn = order < count
        inputs = []
        for client, rows, own_drawn in zip(clients, of_class, drawn.split(sizes), strict=True):
            own = rows[own_drawn]
            if len(own):
                inputs.append(client.examples.inputs(own))
        return Samples("inputs", join_inputs(inputs))


def make_seed(generator: torch.Generator) -> nn.Module:
    """The seed of the server's draws, as a block without parameters."""
    module = nn.Module()
    number = torch.randint(2**62, (), generator=generator)
    module.register_buffer("number", number)
    return module


def picks_name(client: int) -> str:
    """The name of the block with the row numbers of the examples that a client is to store."""
    return f"keep/{client}"


def unconfirmed(state: ServerState, client: int) -> list[Tensor]:
    """Picks of earlier surveys that no reply of the client has confirmed, e.g. because its turns were refused."""
    picks = state.get(picks_name(client))
    return [picks.tensors["rows"]] if picks else []


def exemplar_rows(client: Client, inbox: Inbox) -> Tensor:
    """The client's exemplars as rows of its own examples: those already stored, and new picks of the server."""
    rows = [client.current[:0]]
    if client.private:
        rows.append(client.private["rows"])
    if picks_name(client.id) in inbox:
        rows.append(inbox[picks_name(client.id)].tensors["rows"])
    unique: Tensor = torch.unique(torch.cat(rows))
    return unique


METHOD = FedCBDR
