r"""PRO, projected rehearsal orchestration: fit the current task, then rehearse old classes from projected memory.

The server stores a mean, a diagonal spread and a count of base features for every class (M^u). A client fits its
current task; the base moves only in the first `base_rounds` rounds of a position. The client then trains adapter and
head on a class-balanced mixture of its real features and pseudo-features drawn from the memory *before* the adapter.
After the last round, clients measure their current classes under the aggregated model, and the server pools the
moments. The server never uses gradients.

What the paper leaves open is a setting (`fit_space`, `refresh_at`, `merge`, `fit_when_frozen`, ...). The ablations
of the paper are settings too: `old_memory = "adapted"` (after-adapter memory) or `"none"`, `refresh = "local"` (no
global refresh), `proximal = 0`, and `warmup.rounds = 0` of the protocol.

Beyond the paper, `covariance = "shared"` draws pseudo-features with one within-class covariance matrix that all classes
share, in place of a diagonal spread per class. With `closed_head` predictions come from a linear discriminant head,
solved from the remembered means and this matrix, in place of adapter and head. `keep_scores` adds a loss that keeps the
scores of remembered classes while the base moves. (`shared_covariance`, `pro_evaluation` and `kept_scores` in `parts`.)

Loss: to fit, $`\mathcal{L} = \mathrm{CE}(f_w(x), y) + \eta \, \mathrm{NCE}(a, b) + \lambda \lVert w - w_g \rVert^2`$
with the contrastive loss NCE between projected features $`a`$ and $`b`$ of two strong views, in plastic rounds only. To
rehearse, $`\mathcal{L} = \mathrm{CE}(h_w(u), y)`$ over base features $`u`$ of current examples and $`\tilde{u} =
m_{\tilde{y}} + s \, r_{\tilde{y}} \odot \varepsilon`$ of remembered classes, with mean $`m`$ and spread $`r`$. Which
classes compete is set by `fit_space` and `rehearse_space`; $`\eta`$ = `auxiliary`, $`\lambda`$ = `proximal`, $`s`$ =
`noise`.

Choose it when: only class means and spreads may leave a client, and the warmed-up base needs little training.

Stored: on the server mean, diagonal spread and count of every class, and one covariance matrix where it is shared; on a
client nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Features, Train, Turn
from profcil.memory.bank import Bank, empty_bank, moments_of_rows
from profcil.memory.rehearsal import Rehearsal
from profcil.methods.base import reply, sent_blocks, with_replay
from profcil.methods.parts import kept_scores, reports, shared_covariance
from profcil.methods.parts.addends import MODEL_MEANS, ClassRows
from profcil.methods.parts.memory_blocks import bank_of, block_of, block_of_moments, refreshed_bank
from profcil.methods.parts.pro_evaluation import ProEvaluation
from profcil.methods.parts.pro_settings import ProParams
from profcil.model import losses
from profcil.model.losses import contrast, cross_entropy
from profcil.model.net import MODEL, TAIL, Net, Tail, Weights
from profcil.randomness import torch_generator

Banks = dict[str, Bank]  # by the names of `Pro.banks`
Loss = Callable[[Any, Batch], Tensor]  # of a net, or of its tail where a phase trains on features


class Pro(ProEvaluation):
    """PRO."""

    Params = ProParams
    params: ProParams
    kinds = frozenset({"model", "memory", "statistics"})
    additive = MODEL_MEANS | {"memory_moments": ClassRows(), "adapted_moments": ClassRows()}

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
        """Current-task fitting, Eq. (plastic): supervised loss, auxiliary loss in plastic rounds, proximal term. In
        frozen rounds adapter and head move, on current features of the broadcast base."""
        p = self.params
        weights = model_of(inbox)
        blocks: tuple[str, ...] = MODEL if plastic else TAIL
        loss: Loss = self.fit_loss if plastic else self.tail_loss
        source = None if plastic else Features(client.features(inbox["base"]), client.y)
        if plastic and p.auxiliary:
            weights["projector"] = fresh_projector(client)
            blocks = (*MODEL, "projector")
            loss = self.plastic_loss
        allowed = client.allowed(competing(client, inbox, p.fit_space))
        how = phase_settings(p, client, "fit")
        phase = client.train("fit", weights, blocks, loss, source, proximal=p.proximal, settings=how, allowed=allowed)
        if "starting_head" in inbox:
            phase = kept_scores.extended(phase, self.score_keeping_loss, client, inbox)
        return phase

    def plastic_loss(self, net: Net, batch: Batch) -> Tensor:
        """Supervised loss on a weak view, and the contrastive regulariser between two strong views."""
        loss, _, _ = self.loss_of_views(net, batch)
        return loss

    def loss_of_views(self, net: Net, batch: Batch) -> tuple[Tensor, Inputs, Tensor]:
        """The loss of a plastic round, the weak view, and its features."""
        x = batch["inputs"]
        rng = batch["rng"]
        strong: tuple[Inputs, ...] = ()
        if self.params.auxiliary:
            first = net.strong(x, rng)
            second = net.strong(x, rng)
            strong = (first, second)
        weak = net.weak(x, rng)
        *pair, u = net.encode(*strong, weak)
        loss = cross_entropy(net.classify(u), batch["y"], batch["allowed"])
        if pair:
            a, b = map(net.project, pair)
            auxiliary = contrast(a, b, self.params.temperature)
            loss = loss + self.params.auxiliary * auxiliary
        return loss, weak, u

    def score_keeping_loss(self, net: Net, batch: Batch) -> Tensor:
        """The loss of a plastic round, and that of kept scores (beyond the paper)."""
        loss, weak, u = self.loss_of_views(net, batch)
        kept = kept_scores.loss(net, batch, weak, u, self.params.keep_temperature)
        weight: Tensor = self.params.keep_scores * batch["remembered_weight"]
        return loss + weight * kept

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
        factor = shared_covariance.factor_for(client, inbox) if self.shares_covariance else None
        source = Rehearsal(features, client.y_list, memory, quota=p.quota, noise=p.noise, factor=factor)
        return client.train("rehearse", weights, TAIL, self.tail_loss, source, settings=how, allowed=allowed)

    def head_loss(self, tail: Tail, batch: Batch) -> Tensor:
        """Cross-entropy of the head on adapted features."""
        scores = tail.score(batch["u"])
        return cross_entropy(scores, batch["y"], batch["allowed"])

    # -- the statistics of a client -----------------------------------------------------------------------------------

    def surveys(self, when: When) -> bool:
        """Whether the memory is refreshed under the aggregated model after this round."""
        at = self.params.refresh_at
        at_the_end = when.final and at != "freeze"
        at_the_freeze = self.last_plastic(when) and at != "final"
        refreshes = bool(self.banks) and self.params.refresh == "global"
        return refreshes and (at_the_end or at_the_freeze)

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("base", "adapter") if "adapted" in self.banks else ("base",)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        features = client.features(inbox["base"])
        measured = self.statistics(client, weights_of(inbox), features)
        return Reply(client.id, len(client.current), measured)

    def statistics(self, client: Client, weights: Weights, features: Tensor) -> dict[str, Block]:
        """Class-level moments of the current data, one block per bank. Classes with too few examples are left out."""
        features, rank, labels = client.with_support(features)
        if not labels:
            return {}
        bounded = client.bounded(features)
        moments = {"memory": moments_of_rows(bounded, rank, labels)}
        if "adapted" in self.banks:
            z = Tail(weights["adapter"], {}).adapt(features)
            moments["adapted"] = moments_of_rows(client.bounded(z), rank, labels, radius=True)
        blocks = {f"{name}_moments": block_of_moments(moments[name], client.bound) for name in self.banks}
        if self.shares_covariance:
            blocks["memory_moments"] = shared_covariance.with_scatter(blocks["memory_moments"], bounded, rank)
        return blocks

    def exposed(self, unit: str) -> str:
        """A scatter around the client's own means is no sum over examples."""
        if self.shares_covariance:
            return f"{type(self).__name__} sends a scatter, which is no sum over examples; set covariance = diagonal"
        return super().exposed(unit)

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
    def class_memories(self) -> tuple[str, ...]:
        return self.banks

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
        if self.shares_covariance:
            state = state.put(covariance=shared_covariance.empty_block(like))
        return state

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        needed = (*MODEL, *self.memory_blocks)
        if not self.plastic(when):
            return needed
        kept = [name for name in kept_scores.STARTING if name in state.blocks]
        return (*needed, *kept)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg. Without global refresh, local statistics are stored until the position ends."""
        state = super().aggregate(state, replies, when)
        if self.params.refresh == "local" and self.last_plastic(when):
            state = reports.store(state, replies)
        return state

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """The state with the memory refreshed by the clients' statistics, Eq. (global-memory-refresh)."""
        for name in self.memory_blocks:
            bank = "memory" if name == "covariance" else name
            found = sent_blocks(replies, f"{bank}_moments")
            if found:
                state = self.refresh_block(state, name, found, when)
        return state

    def refresh_block(self, state: ServerState, name: str, found: Sequence[Block], when: When) -> ServerState:
        """The state with one block of the memory refreshed. A second refresh within a position starts from the values
        before the first, so that no example counts twice."""
        backup = f"{name}_before_refresh"
        before = state.get(backup) or state.blocks[name]
        if name == "covariance":
            fresh = shared_covariance.refreshed(before, found)
        else:
            fresh = refreshed_bank(state.blocks[name], before, found, self.params.merge)
        state = state.put(**{name: fresh})
        if self.params.refresh_at == "both" and not when.final:  # another refresh follows
            return state.put(**{backup: before})
        return state.drop(backup)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """Refreshes the memory from pending local statistics, and removes what is needed within a position only."""
        if self.params.refresh == "local":
            state = self.absorb(state, reports.stored(state), when)
        state = reports.without_reports(state)
        backups = [f"{name}_before_refresh" for name in self.memory_blocks]
        state = state.drop(*backups)
        if not self.params.keep_scores:
            return state
        head = self.solve_head(state) if self.params.closed_head else None
        return kept_scores.with_start(state, head)


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
    own = client.settings
    lr = getattr(params, f"{phase}_lr") or own.lr
    epochs = getattr(params, f"{phase}_epochs") or own.epochs
    if getattr(params, f"{phase}_schedule") == "cosine":
        angle = math.pi * client.when.round / client.when.rounds
        lr *= (1 + math.cos(angle)) / 2
    if lr == own.lr and epochs == own.epochs:
        return own
    return replace(own, lr=lr, epochs=epochs)


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
