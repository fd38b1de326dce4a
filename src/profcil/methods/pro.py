"""PRO, projected rehearsal orchestration: fit the current task, then rehearse old classes from projected memory.

The server stores a mean, a diagonal spread and a count of base features for every class (M^u). A client fits its
current task; the base moves only in the first `base_rounds` rounds of a position. The client then trains adapter and
head on a class-balanced mixture of its real features and pseudo-features drawn from the memory *before* the adapter.
After the last round, clients measure their current classes under the aggregated model, and the server pools the
moments. The server never uses gradients.

Where the paper is silent, a setting decides (`fit_space`, `refresh_at`, `merge`, `fit_when_frozen`, ...). The ablations
of the paper are settings too: `old_memory = "adapted"` (after-adapter memory) or `"none"`, `refresh = "local"` (no
global refresh), `proximal = 0`, and `warmup.rounds = 0` of the protocol.

Beyond the paper, `covariance = "shared"` draws pseudo-features with one within-class covariance matrix that all classes
share, in place of a diagonal spread per class. At every refresh clients also send the scatter of their features around
their class means, and the server pools it exactly. It stores the mean matrix of all positions, weighted by their
examples: how a moved base changes the covariance of old classes is unknown. With `closed_head` predictions come from a
linear discriminant head, solved from the remembered means and this matrix, in place of adapter and head.

Stored: on the server mean, diagonal spread and count of every class, and one covariance matrix where it is shared; on a
client nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import TrainSettings
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Features, Train, Turn
from profcil.memory import covariance, linear
from profcil.memory.bank import Bank, empty_bank, moments_of_rows, pool, restore, update
from profcil.memory.covariance import Covariance
from profcil.memory.rehearsal import Rehearsal, pseudo_features
from profcil.methods.base import Method, Samples, reply, sent_blocks, with_replay
from profcil.methods.parts import reports, solved_head
from profcil.methods.parts.kept_scores import score_constants
from profcil.methods.parts.memory_blocks import (
    bank_of,
    block_of,
    block_of_covariance,
    block_of_moments,
    covariance_of,
    moments_of,
    with_tensor,
)
from profcil.methods.parts.pro_settings import ProParams
from profcil.model import losses
from profcil.model.losses import contrast, cross_entropy, soft_cross_entropy
from profcil.model.net import MODEL, TAIL, Net, Tail, Weights
from profcil.randomness import torch_generator

STARTING = ("starting_base", "starting_adapter", "starting_head")  # copies of a position's first model


Banks = dict[str, Bank]  # by the names of `Pro.banks`
Loss = Callable[[Net, Batch], Tensor]


class Pro(Method):
    """PRO."""

    Params = ProParams
    params: ProParams
    kinds = frozenset({"model", "memory", "statistics"})

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """Adds a second base where one is stored: the position's starting base, which is frozen while a client fits."""
        if self.stores_starting_base:
            net.attach("starting_base", copy.deepcopy(net.base))

    @property
    def stores_starting_base(self) -> bool:
        """Whether the server stores the base that a position starts from: for `keep_scores`."""
        return bool(self.params.keep_scores)

    # -- the client ---------------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """Current-task fitting, then rehearsal."""
        plastic = self.plastic(client.when)
        weights = model_of(inbox)
        if plastic or self.params.fit_when_frozen:
            fitted = yield self.fit(client, inbox, plastic)
            weights = self.fitted_model(client, inbox, fitted.weights)
        features = client.features(weights["base"] if plastic else inbox["base"])
        banks, sent = self.align(client, inbox, weights, features)
        rehearsal = self.rehearse(client, inbox, weights, features, banks)
        done = yield rehearsal
        if self.params.refresh == "local" and self.last_plastic(client.when):
            sent |= self.statistics(client, done.weights, features)
        moved = MODEL if plastic else TAIL
        answer = reply(client, done.weights, moved, loss=done.loss, **sent)
        real = self.params.quota * len(client.labels)
        pseudo = rehearsal.source.size - real
        return with_replay(client, answer, rehearsal.epochs, self.params.quota, pseudo)

    def plastic(self, when: When) -> bool:
        """Whether the base moves in this round."""
        return when.round < self.params.base_rounds

    def last_plastic(self, when: When) -> bool:
        """Whether this is the last round of the position in which the base moves; the first round if it never moves."""
        plastic_rounds = min(self.params.base_rounds, when.rounds)
        return when.round == max(0, plastic_rounds - 1)

    def fit(self, client: Client, inbox: Inbox, plastic: bool) -> Train:
        """Current-task fitting, Eq. (plastic): supervised loss, auxiliary loss in plastic rounds, proximal term."""
        if plastic:
            return self.fit_model(client, inbox)
        return self.fit_tail(client, inbox)

    def fit_model(self, client: Client, inbox: Inbox) -> Train:
        """Fitting in a plastic round: base, adapter and head move."""
        weights = model_of(inbox)
        blocks: tuple[str, ...] = MODEL
        loss: Loss = self.fit_loss
        classes = competing(client, inbox, self.params.fit_space)
        constants = {"allowed": client.allowed(classes)}
        if self.params.auxiliary:
            weights["projector"] = fresh_projector(client)
            blocks = (*MODEL, "projector")
            loss = self.plastic_loss
        if "starting_head" in inbox:
            start = inbox["starting_base"].tensors
            weights["starting_base"] = {k: client.keep(t) for k, t in start.items()}
            constants |= score_constants(client, inbox)
            loss = self.score_keeping_loss
        how = phase_settings(self.params, client, "fit")
        pull = self.params.proximal
        phase = client.train("fit", weights, blocks, loss, proximal=pull, settings=how)
        return replace(phase, constants=constants)

    def fit_tail(self, client: Client, inbox: Inbox) -> Train:
        """Fitting in a frozen round: adapter and head move, on current features of the broadcast base."""
        weights = model_of(inbox)
        source = Features(client.features(inbox["base"]), client.y)
        allowed = client.allowed(competing(client, inbox, self.params.fit_space))
        how = phase_settings(self.params, client, "fit")
        pull = self.params.proximal
        return client.train("fit", weights, TAIL, self.tail_loss, source, proximal=pull, settings=how, allowed=allowed)

    def plastic_loss(self, net: Net, batch: Batch) -> Tensor:
        """Supervised loss on a weak view, and the contrastive regulariser between two strong views."""
        x = batch["inputs"]
        rng = batch["rng"]
        first = net.strong(x, rng)
        second = net.strong(x, rng)
        weak = net.weak(x, rng)
        a, b, u = net.encode(first, second, weak)
        auxiliary = self.contrast_views(net, a, b)
        loss = cross_entropy(net.classify(u), batch["y"], batch["allowed"])
        return loss + self.params.auxiliary * auxiliary

    def contrast_views(self, net: Net, a: Tensor, b: Tensor) -> Tensor:
        """The contrastive loss between the features of two views."""
        return contrast(net.project(a), net.project(b), self.params.temperature)

    def score_keeping_loss(self, net: Net, batch: Batch) -> Tensor:
        """The fitting loss plus a distillation loss on the scores of remembered classes (Li and Hoiem, 2016).

        The position's starting head scores features of its starting base and of the moving base; the loss is the
        cross-entropy between the two. Both bases see the same views in the same mode. A target of the round's
        broadcast model would move along with the base from round to round.
        """
        x = batch["inputs"]
        rng = batch["rng"]
        strong = (net.strong(x, rng), net.strong(x, rng)) if self.params.auxiliary else ()
        weak = net.weak(x, rng)
        *pair, u = net.encode(*strong, weak)
        loss = cross_entropy(net.classify(u), batch["y"], batch["allowed"])
        if self.params.auxiliary:
            loss = loss + self.params.auxiliary * self.contrast_views(net, *pair)
        with torch.no_grad():
            before = net.starting_base(*weak)  # type: ignore[operator]
        scores = self.kept_scores(net, batch, u)
        target = self.kept_scores(net, batch, before)
        kept = soft_cross_entropy(scores, target, batch["remembered"])
        weight: Tensor = self.params.keep_scores * batch["remembered_weight"]
        return loss + weight * kept

    def kept_scores(self, net: Net, batch: Batch, u: Tensor) -> Tensor:
        """Scores of the position's starting head, divided by the temperature: of the closed head where it predicts,
        else of adapter and head. In float32, because scores of a closed head are small differences of large numbers."""
        with torch.autocast(u.device.type, enabled=False):
            u = u.float()
            if self.params.closed_head:
                scores = F.linear(u, batch["starting_weight"], batch["starting_bias"])
            else:
                adapter = {k: batch[f"starting_{k}"] for k in net.adapter}
                head = {"weight": batch["starting_weight"]}
                scores = Tail(adapter, head, net.cosine).classify(u)
            return scores / self.params.keep_temperature

    tail_loss = staticmethod(losses.classification)

    def fitted_model(self, client: Client, inbox: Inbox, fitted: Weights) -> Weights:
        """The fitted blocks of the model, with the BatchNorm statistics that the settings choose."""
        weights = {b: fitted[b] for b in MODEL}
        if self.params.batch_statistics == "broadcast":
            broadcast = inbox["base"].tensors
            weights["base"] = with_buffers(client.net, weights["base"], broadcast)
        return weights

    def align(self, client: Client, inbox: Inbox, weights: Weights, features: Tensor) -> tuple[Banks, dict[str, Block]]:
        """The memory that the client rehearses from, and blocks to send with the reply. PRO uses the memory as it was
        broadcast; PRO-MAX transports it. `features` are those of the current examples under the fitted base."""
        banks = {name: bank_of(inbox[name]) for name in self.banks}
        return banks, {}

    def rehearse(self, client: Client, inbox: Inbox, weights: Weights, features: Tensor, banks: Banks) -> Train:
        """Projected pseudo multi-task training, Eq. (pro-loss), without a proximal term."""
        p = self.params
        allowed = client.allowed(competing(client, inbox, p.rehearse_space))
        how = phase_settings(p, client, "rehearse")
        if p.old_memory == "adapted":
            z = Tail(weights["adapter"], {}).adapt(features)
            source = Rehearsal(z, client.y_list, banks["adapted"], quota=p.quota, noise=p.noise)
            return client.train("rehearse", weights, ("head",), self.head_loss, source, settings=how, allowed=allowed)
        memory = banks.get("memory")
        factor = self.factor(client, inbox)
        source = Rehearsal(features, client.y_list, memory, quota=p.quota, noise=p.noise, factor=factor)
        return client.train("rehearse", weights, TAIL, self.tail_loss, source, settings=how, allowed=allowed)

    def factor(self, client: Client, inbox: Inbox) -> Tensor | None:
        """The factor of the shared covariance; None without one, or before anything is remembered. It is computed once
        for each version of the matrix."""
        if not self.shares_covariance or not inbox["memory"].labels:
            return None
        block = inbox["covariance"]
        made = client.once(("factor", block.version), lambda: covariance.factor(covariance_of(block).matrix))
        return client.keep(made)

    def head_loss(self, tail: Tail, batch: Batch) -> Tensor:
        """Cross-entropy of the head on adapted features."""
        scores = tail.score(batch["u"])
        return cross_entropy(scores, batch["y"], batch["allowed"])

    # -- the statistics of a client -----------------------------------------------------------------------------------

    def surveys(self, when: When) -> bool:
        refreshes = bool(self.banks) and self.params.refresh == "global"
        return refreshes and self.refresh_due(when)

    def refresh_due(self, when: When) -> bool:
        """Whether the memory is refreshed after this round."""
        at = self.params.refresh_at
        if at == "frozen":
            following = replace(when, round=when.round + 1)
            return when.final or not self.plastic(following)
        at_the_end = when.final and at != "freeze"
        at_the_freeze = self.last_plastic(when) and at != "final"
        return at_the_end or at_the_freeze

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        space = ("base", "adapter") if "adapted" in self.banks else ("base",)
        return (*space, "reported_clients")

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        if reports.has_reported(client, inbox):
            return Reply(client.id, len(client.current))
        features = client.features(inbox["base"])
        measured = self.statistics(client, weights_of(inbox), features)
        return Reply(client.id, len(client.current), measured)

    def statistics(self, client: Client, weights: Weights, features: Tensor) -> dict[str, Block]:
        """Class-level moments of the current data, one block per bank."""
        moments = {"memory": moments_of_rows(features, client.rank, client.labels)}
        if "adapted" in self.banks:
            z = Tail(weights["adapter"], {}).adapt(features)
            moments["adapted"] = moments_of_rows(z, client.rank, client.labels, radius=True)
        blocks = {f"{name}_moments": block_of_moments(moments[name]) for name in self.banks}
        if self.shares_covariance:
            scatter = covariance.packed_scatter(features, client.rank, moments["memory"].mean)
            blocks["memory_moments"] = with_tensor(blocks["memory_moments"], scatter=scatter)
        return blocks

    # -- the server ---------------------------------------------------------------------------------------------------

    @property
    def banks(self) -> tuple[str, ...]:
        """The memories that exist: M^u as "memory", M^z as "adapted"; none in the ablation without memory."""
        p = self.params
        if p.old_memory == "none":
            return ()
        if p.adapted_bank or p.old_memory == "adapted":
            return ("memory", "adapted")
        return ("memory",)

    @property
    def shares_covariance(self) -> bool:
        """Whether there is a covariance matrix that all classes share."""
        return self.params.covariance == "shared" and "memory" in self.banks

    @property
    def memory_blocks(self) -> tuple[str, ...]:
        """The blocks of the memory."""
        return (*self.banks, "covariance") if self.shares_covariance else self.banks

    def begin(self, weights: Weights) -> ServerState:
        like = weights["adapter"]["scale"]
        width = len(like)
        empty = {"memory": empty_bank(like, width), "adapted": empty_bank(like, 1)}
        state = super().begin({b: weights[b] for b in MODEL})
        banks = {name: block_of(empty[name]) for name in self.banks}
        state = state.put(**banks)
        if not self.shares_covariance:
            return state
        zeros = like.new_zeros(width, width, dtype=torch.float64)
        nothing = Covariance(zeros, 0)
        return state.put(covariance=block_of_covariance(nothing))

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        needed = (*MODEL, *self.memory_blocks)
        if not self.plastic(when):
            return needed
        kept = [name for name in STARTING if name in state.blocks]
        return (*needed, *kept)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg. Without global refresh, local statistics are stored until the position ends."""
        state = super().aggregate(state, replies, when)
        if self.params.refresh == "local" and self.last_plastic(when):
            for r in replies:
                moments = {name: block for name, block in r.blocks.items() if name.endswith("_moments")}
                state = reports.store(state, r.client, moments)
        return state

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Memory refresh. If clients report in several rounds, it starts anew from the memory before the first report,
        with all reports."""
        if self.params.refresh_at != "frozen" or not self.refresh_due(when):
            return self.refresh_memory(state, replies, when)
        fresh = [r for r in replies if r.blocks]
        if not fresh:
            return state
        state = reports.gather(state, fresh, self.memory_blocks)
        return self.refresh_memory(state, reports.stored(state), when)

    def refresh_memory(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """The state with the memory refreshed by these reports, Eq. (global-memory-refresh)."""
        for name in self.banks:
            found = sent_blocks(replies, f"{name}_moments")
            if found:
                state = self.refresh_bank(state, name, found, when)
        measured = sent_blocks(replies, "memory_moments")
        if measured and self.shares_covariance:
            state = self.refresh_covariance(state, measured, when)
        return state

    def refresh_bank(self, state: ServerState, name: str, found: Sequence[Block], when: When) -> ServerState:
        """The state with one bank refreshed. A second refresh within a position first restores the measured classes to
        their values before the first, so that no example counts twice."""
        backup = f"{name}_before_refresh"
        now = state.blocks[name]
        before = state.get(backup) or now
        fresh = pool([moments_of(block) for block in found])
        bank = restore(bank_of(now), bank_of(before), fresh.labels)
        refreshed = update(bank, fresh, self.params.merge)
        state = state.put(**{name: block_of(refreshed)})
        return self.with_backup(state, backup, before, when)

    def refresh_covariance(self, state: ServerState, found: Sequence[Block], when: When) -> ServerState:
        """The state with the covariance blended with that of the current examples, weighted by counts. A second refresh
        within a position starts from the matrix before the first, so that no example counts twice."""
        backup = "covariance_before_refresh"
        before = state.get(backup) or state.blocks["covariance"]
        parts = [moments_of(block) for block in found]
        scatters = [block.tensors["scatter"] for block in found]
        fresh = covariance.pool(parts, scatters, pool(parts))
        blended = covariance.blend(covariance_of(before), fresh)
        state = state.put(covariance=block_of_covariance(blended))
        return self.with_backup(state, backup, before, when)

    def with_backup(self, state: ServerState, name: str, before: Block, when: When) -> ServerState:
        """The state with a backup if another refresh follows within the position, else without it."""
        if self.params.refresh_at == "both" and not when.final:
            return state.put(**{name: before})
        return state.drop(name)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """Refreshes the memory from pending local statistics, and removes what is needed within a position only."""
        if self.params.refresh == "local":
            state = self.absorb(state, reports.stored(state), when)
        state = reports.without_reports(state)
        backups = [f"{name}_before_refresh" for name in self.memory_blocks]
        state = state.drop(*backups)
        return self.with_starting_model(state) if self.params.keep_scores else state

    def with_starting_model(self, state: ServerState) -> ServerState:
        """The state with copies of the base and the head that the next position starts from, for `keep_scores`."""
        if not self.params.closed_head:
            return state.also(starting_base="base", starting_adapter="adapter", starting_head="head")
        labels = state.blocks["memory"].labels
        if not labels:
            return state
        solved = self.solve_head(state).tensors
        weight = solved["weight"].float()
        bias = solved["bias"].float()
        head = Block("memory", {"weight": weight, "bias": bias}, labels)
        return state.put(starting_head=head).also(starting_base="base")

    # -- prediction ---------------------------------------------------------------------------------------------------

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Scores of adapter and head, or of the closed head. With the latter a class without memory never wins over one
        that has it."""
        if not self.params.closed_head:
            return super().scores(net, state, features)
        head = state.get(solved_head.NAME) or self.solve_head(state)
        return solved_head.scores_of(head, features, net.classes)

    def solve_head(self, state: ServerState) -> Block:
        """The linear discriminant head, a row for each remembered class."""
        memory = state.blocks["memory"]
        mean = memory.tensors["mean"].double()
        if not memory.labels:
            return solved_head.solved_head((), mean, mean[:, 0])
        matrix = covariance_of(state.blocks["covariance"]).matrix
        shrunk = covariance.shrunk(matrix, self.params.shrink)
        weight, bias = linear.discriminants(mean, shrunk)
        return solved_head.solved_head(memory.labels, weight, bias)

    def deployed(self, state: ServerState) -> ServerState:
        """The model, or the solved head in place of the memory."""
        if not self.params.closed_head:
            return state.only(*MODEL)
        head = self.solve_head(state)
        mean = state.blocks["memory"].tensors["mean"]
        return solved_head.deploy_head(state, head, mean)

    def temperature(self, state: ServerState) -> float | None:
        return solved_head.stored_temperature(state) if self.params.closed_head else 1.0

    # -- diagnostics --------------------------------------------------------------------------------------------------

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        spaces = {"memory": lambda u: u, "adapted": net.tail.adapt}
        return {name: (state.blocks[name], spaces[name]) for name in self.banks}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        space = "adapted" if self.params.old_memory == "adapted" else "base"
        bank = state.get("adapted" if space == "adapted" else "memory")
        if bank is None or label not in bank.labels:
            return None
        row = [bank.labels.index(label)]
        mean = bank.tensors["mean"][row]
        spread = bank.tensors["spread"][row]
        factor = None
        if self.shares_covariance:
            factor = covariance.factor(covariance_of(state.blocks["covariance"]).matrix)
        features = pseudo_features(mean, spread, count, self.params.noise, rng, factor)
        return Samples(space, (features,))


def competing(client: Client, inbox: Inbox, space: str) -> tuple[int, ...]:
    """The classes that the loss of a phase competes over."""
    if space == "seen":
        return client.seen
    if space == "own" or "memory" not in inbox:
        return client.labels
    return (*client.labels, *inbox["memory"].labels)


def model_of(inbox: Inbox) -> Weights:
    """The weights of the broadcast model."""
    return {name: dict(inbox[name].tensors) for name in MODEL}


def phase_settings(params: ProParams, client: Client, phase: str) -> TrainSettings:
    """The run's training settings with the learning rate and epochs of a phase, where it has its own. A cosine schedule
    starts every position at the full rate and decreases each round towards zero."""
    lr = getattr(params, f"{phase}_lr") or client.settings.lr
    epochs = getattr(params, f"{phase}_epochs") or client.settings.epochs
    if getattr(params, f"{phase}_schedule") == "cosine":
        angle = math.pi * client.when.round / client.when.rounds
        lr *= (1 + math.cos(angle)) / 2
    return replace(client.settings, lr=lr, epochs=epochs)


def with_buffers(net: Net, base: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a base with the buffers of another."""
    buffers = {name for name, _ in net.base.named_buffers()}
    return {name: other[name] if name in buffers else tensor for name, tensor in base.items()}


def fresh_projector(client: Client) -> dict[str, Tensor]:
    """A new auxiliary head, the same for all clients in this round. It is discarded after the phase."""
    rng = torch_generator(client.seed, "projector", client.when.position, client.when.round)
    bound = client.net.features**-0.5
    projector = {}
    for name, like in client.net.projector.items():
        drawn = torch.empty(like.shape).uniform_(-bound, bound, generator=rng)
        projector[name] = client.tensor(drawn)
    return projector


METHOD = Pro
