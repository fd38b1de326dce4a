"""PRO, projected rehearsal orchestration: fit the current task, then rehearse old classes from projected memory.

The server keeps a mean, a diagonal spread and a count of base features for every class (M^u). A client fits its
current task (the base moves in the first `base_rounds` rounds of a position only), then trains adapter and head on a
class-balanced mixture of its real features and pseudo-features drawn from the memory *before* the adapter. After the
last round, clients measure their current classes under the aggregated model, and the server pools the moments. The
server never takes a gradient.

Where the paper is silent, a setting decides (`fit_space`, `refresh_at`, `merge`, `fit_when_frozen`, ...); the
ablations of the paper are settings too: `old_memory = "adapted"` (after-adapter memory) or `"none"`,
`refresh = "local"` (no global refresh), `proximal = 0`, and the protocol's own `warmup.rounds = 0`.

Stored: on the server mean, diagonal spread and count of every class; on a client nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.config import Checked, TrainSettings, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Features, Train, Turn
from profcil.memory.bank import Bank, Moments, empty_bank, moments_of_rows, pool, rewind, update
from profcil.memory.rehearsal import Rehearsal, Roll, pseudo
from profcil.methods.base import Method, Samples, reply, with_replay
from profcil.model import losses
from profcil.model.losses import contrast, cross_entropy, soft_cross_entropy
from profcil.model.net import MODEL, TAIL, Net, Tail, Weights
from profcil.randomness import torch_generator

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class ProParams(Checked):
    """Settings of PRO; the defaults are the paper's where it gives one. Where it does not, `fit_when_frozen` and
    `refresh_at` were chosen on validation seeds (docs/results.md); the paper's text is `true` and `"final"`."""

    base_rounds: int = setting(2, "rounds at the start of each position in which the base encoder moves", low=0)
    fit_when_frozen: bool = setting(False, "fit adapter and head on current features alone in frozen rounds too")
    auxiliary: float = setting(0.05, "weight of the contrastive regulariser while the base moves", low=0.0)
    temperature: float = setting(0.5, "temperature of that regulariser", low=1e-3)
    proximal: float = setting(0.01, "λ of the pull towards the broadcast model during fitting", low=0.0)
    old_memory: str = setting(
        "base",
        "where old classes are rehearsed: before the adapter, after it (head only), or nowhere",
        choices=("base", "adapted", "none"),
    )
    quota: int = setting(20, "features per class, client and local epoch in the balanced set", low=1)
    noise: float = setting(0.1, "γ: scale of the spread in pseudo-features", low=0.0)
    fit_space: str = setting(
        "remembered",
        "classes the loss of Eq. (sup) competes over: the client's own, those and the remembered ones, or all of Y^(p)",
        choices=("own", "remembered", "seen"),
    )
    rehearse_space: str = setting(
        "remembered",
        "classes the loss of Eq. (pro-loss) competes over: the client's own and remembered ones, or all of Y^(p)",
        choices=("remembered", "seen"),
    )
    fit_lr: float = setting(
        0.0, "learning rate of Eq. (plastic); 0 = train.lr, the paper's one rate for everything", low=0.0
    )
    rehearse_lr: float = setting(
        0.0, "learning rate of Eq. (pro-loss); 0 = train.lr, the paper's one rate for everything", low=0.0
    )
    fit_epochs: int = setting(
        0, "local epochs of fitting, which the paper calls short and gives no number; 0 = train.epochs", low=0
    )
    rehearse_epochs: int = setting(
        0, "local epochs of rehearsal; 0 = train.epochs, the local epochs of the protocol table", low=0
    )
    fit_schedule: str = setting(
        "constant",
        "learning rate of fitting over a position's rounds; the paper calls its rate initial and gives no schedule",
        choices=SCHEDULES,
    )
    rehearse_schedule: str = setting("constant", "the same for the learning rate of rehearsal", choices=SCHEDULES)
    batch_statistics: str = setting(
        "averaged",
        "BatchNorm statistics a client returns after fitting: its own, to be averaged as Eq. (fedavg) says, or those "
        "of the broadcast model",
        choices=("averaged", "broadcast"),
    )
    refresh: str = setting(
        "global", "statistics under the aggregated or under the local model", choices=("global", "local")
    )
    refresh_at: str = setting(
        "both",
        "when memory is refreshed: after the last round, when the base stops moving, or both",
        choices=("final", "freeze", "both"),
    )
    merge: str = setting("counts", "a class that returns: pooled by counts, or replaced", choices=("counts", "replace"))
    adapted_bank: bool = setting(False, "keep the auxiliary adapted-space memory M^z as well")
    keep_scores: float = setting(
        0.0,
        "beyond the paper: weight of keeping the broadcast model's scores of remembered classes while the base moves",
        low=0.0,
    )


Banks = dict[str, Bank]  # by the names of `Pro.banks`
Loss = Callable[[Net, Batch], Tensor]


class Pro(Method):
    """PRO."""

    Params = ProParams
    kinds = frozenset({"model", "memory", "statistics"})

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """A second base for `keep_scores`: the broadcast one, which stays frozen while a client fits."""
        if self.params.keep_scores:
            net.attach("start", copy.deepcopy(net.base))

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        weights, banks = weights_of(inbox), {name: bank_of(inbox[name]) for name in self.banks}
        plastic = self.plastic(client.when)
        if plastic or self.params.fit_when_frozen:
            fitted = yield self.fit(client, inbox, plastic)
            weights = {b: fitted.weights[b] for b in MODEL}
            if self.params.batch_statistics == "broadcast":
                weights["base"] = with_buffers(client.net, weights["base"], inbox["base"].tensors)
        features = client.features(weights["base"] if plastic else inbox["base"])
        banks, sent = self.align(client, inbox, banks, weights)
        phase = self.rehearse(client, inbox, weights, features, banks)
        done = yield phase
        if self.params.refresh == "local" and self.settles(client.when):
            sent |= self.statistics(client, done.weights, features)
        answer = reply(client, done.weights, MODEL if plastic else TAIL, loss=done.loss, **sent)
        remembered = phase.source.size - self.params.quota * len(client.labels)
        return with_replay(client, answer, phase.epochs, self.params.quota, remembered)

    def plastic(self, when: When) -> bool:
        """Whether the base moves in this round."""
        return when.round < self.params.base_rounds

    def fit(self, client: Client, inbox: Inbox, plastic: bool) -> Train:
        """Current-task fitting, Eq. (plastic): supervised loss, auxiliary loss while the base moves, proximal pull."""
        allowed = client.allowed(competing(client, inbox, self.params.fit_space))
        weights = weights_of(inbox)
        pull = self.params.proximal
        how = phase_settings(self.params, client, "fit")
        if not plastic:
            source = Features(client.features(inbox["base"]), client.y)
            return client.train(
                "fit", weights, TAIL, self.tail_loss, source, proximal=pull, settings=how, allowed=allowed
            )
        blocks: tuple[str, ...] = MODEL
        loss: Loss = self.fit_loss
        constants: dict[str, Tensor] = {}
        if self.params.auxiliary:
            weights["projector"] = fresh_projector(client)
            blocks = (*MODEL, "projector")
            loss = self.plastic_loss
        if self.params.keep_scores:
            weights["start"] = {k: client.keep(t) for k, t in inbox["base"].tensors.items()}
            constants = kept_constants(client, inbox)
            loss = self.kept_loss
        phase = client.train("fit", weights, blocks, loss, proximal=pull, settings=how, allowed=allowed)
        return replace(phase, constants=phase.constants | constants)

    def plastic_loss(self, net: Net, batch: Batch) -> Tensor:
        x, rng = batch["inputs"], batch["rng"]
        a, b, u = net.encode(net.strong(x, rng), net.strong(x, rng), net.weak(x, rng))
        auxiliary = contrast(net.project(a), net.project(b), self.params.temperature)
        return cross_entropy(net.classify(u), batch["y"], batch["allowed"]) + self.params.auxiliary * auxiliary

    def kept_loss(self, net: Net, batch: Batch) -> Tensor:
        """The fitting loss, and the cross-entropy between the scores that the broadcast adapter and head give to
        remembered classes on features of the broadcast base and on features of the moving one (Li and Hoiem, 2016).
        Both bases see the same views in the same mode."""
        x, rng = batch["inputs"], batch["rng"]
        strong = (net.strong(x, rng), net.strong(x, rng)) if self.params.auxiliary else ()
        weak = net.weak(x, rng)
        *pair, u = net.encode(*strong, weak)
        loss = cross_entropy(net.classify(u), batch["y"], batch["allowed"])
        if self.params.auxiliary:
            a, b = pair
            loss = loss + self.params.auxiliary * contrast(net.project(a), net.project(b), self.params.temperature)
        with torch.no_grad():
            before = net.start(*weak)  # type: ignore[operator]
        tail = Tail({k: batch[f"start_{k}"] for k in net.adapter}, {"weight": batch["start_head"]}, net.cosine)
        kept = soft_cross_entropy(tail.classify(u), tail.classify(before), batch["kept"])
        return loss + self.params.keep_scores * batch["keep_scores"] * kept

    tail_loss = staticmethod(losses.classification)

    def align(self, client: Client, inbox: Inbox, banks: Banks, weights: Weights) -> tuple[Banks, dict[str, Block]]:
        """Where PRO-MAX moves the memory along; PRO takes it as it came."""
        return banks, {}

    def rehearse(self, client: Client, inbox: Inbox, weights: Weights, features: Tensor, banks: Banks) -> Train:
        """Projected pseudo multi-task training, Eq. (pro-loss), without a proximal term."""
        p = self.params
        allowed = client.allowed(competing(client, inbox, p.rehearse_space))
        how = phase_settings(p, client, "rehearse")
        bank = banks.get("adapted" if p.old_memory == "adapted" else "memory")
        old = bank.labels if bank else ()
        roll = Roll(client.y_list, old, p.quota, client.y.device)
        if p.old_memory == "adapted":
            z = Tail(weights["adapter"], {}).adapt(features)
            source = Rehearsal(z, roll, bank, noise=p.noise)
            return client.train("rehearse", weights, ("head",), self.head_loss, source, settings=how, allowed=allowed)
        source = Rehearsal(features, roll, bank, noise=p.noise)
        return client.train("rehearse", weights, TAIL, self.tail_loss, source, settings=how, allowed=allowed)

    def head_loss(self, tail: Tail, batch: Batch) -> Tensor:
        return cross_entropy(tail.score(batch["u"]), batch["y"], batch["allowed"])

    # -- the server, and what it is told ----------------------------------------------------------------------------

    @property
    def banks(self) -> tuple[str, ...]:
        """Which memories exist: M^u as `memory`, M^z as `adapted`, none in the ablation without."""
        p = self.params
        if p.old_memory == "none":
            return ()
        return ("memory", "adapted") if p.adapted_bank or p.old_memory == "adapted" else ("memory",)

    def begin(self, weights: Weights) -> ServerState:
        like = weights["adapter"]["scale"]
        empty = {"memory": empty_bank(like, len(like)), "adapted": empty_bank(like, 1)}
        return super().begin({b: weights[b] for b in MODEL}).put(**{name: block_of(empty[name]) for name in self.banks})

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return (*MODEL, *self.banks)

    def settles(self, when: When) -> bool:
        """Whether the base has just moved for the last time in this position."""
        return when.round == max(0, min(self.params.base_rounds, when.rounds) - 1)

    def surveys(self, when: When) -> bool:
        at = self.params.refresh_at
        due = (at != "freeze" and when.final) or (at != "final" and self.settles(when))
        return bool(self.banks) and self.params.refresh == "global" and due

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("base", "adapter") if "adapted" in self.banks else ("base",)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        features = client.features(inbox["base"])
        return Reply(client.id, len(client.current), self.statistics(client, weights_of(inbox), features))

    def statistics(self, client: Client, weights: Weights, features: Tensor) -> dict[str, Block]:
        """Class-level moments of the current data, one block a bank."""
        rows = (client.rank, client.labels)
        found = {"memory": moments_of_rows(features, *rows)}
        if "adapted" in self.banks:
            found["adapted"] = moments_of_rows(Tail(weights["adapter"], {}).adapt(features), *rows, radius=True)
        return {f"{name}_moments": block_of_moments(found[name]) for name in self.banks}

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Memory refresh, Eq. (global-memory-refresh). A second refresh within a position sets the classes it measures
        back to where they were before the first, so that nothing counts twice."""
        for name in self.banks:
            parts = [r.blocks[f"{name}_moments"] for r in replies if f"{name}_moments" in r.blocks]
            if not parts:
                continue
            now, settled, fresh = state.blocks[name], f"settled_{name}", pool([moments_of(b) for b in parts])
            before = state.get(settled) or now
            start = rewind(bank_of(now), bank_of(before), fresh.labels)
            state = state.put(**{name: block_of(update(start, fresh, self.params.merge))})
            again = self.params.refresh_at == "both" and not when.final
            state = state.put(**{settled: before}) if again else state.drop(settled)
        return state

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
        mean, spread = bank.tensors["mean"][row], bank.tensors["spread"][row]
        return Samples(space, (pseudo(mean, spread, count, self.params.noise, rng),))

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        state = super().aggregate(state, replies, when)
        if self.params.refresh == "local" and self.settles(
            when
        ):  # without global refresh: kept until the position ends
            pending = {f"{r.client}/{n}": b for r in replies for n, b in r.blocks.items() if n.endswith("_moments")}
            state = state.put(**{f"pending/{name}": b for name, b in pending.items()})
        return state

    def end_position(self, state: ServerState, when: When) -> ServerState:
        pending = [n for n in state.blocks if n.startswith("pending/")]
        replies = [Reply(0, 0, {n.rsplit("/", 1)[1]: state.blocks[n]}) for n in pending]
        return self.absorb(state.drop(*pending), replies, when).drop(*(f"settled_{name}" for name in self.banks))


def competing(client: Client, inbox: Inbox, space: str) -> tuple[int, ...]:
    """The classes that a phase's loss competes over."""
    if space == "seen":
        return client.seen
    if space == "own" or "memory" not in inbox:
        return client.labels
    return (*client.labels, *inbox["memory"].labels)


def phase_settings(params: ProParams, client: Client, phase: str) -> TrainSettings:
    """The run's training settings with a phase's own learning rate and epochs, where it has them. A cosine schedule
    begins at the full rate and falls towards zero, a step a round, anew at every position."""
    lr = getattr(params, f"{phase}_lr") or client.settings.lr
    epochs = getattr(params, f"{phase}_epochs") or client.settings.epochs
    if getattr(params, f"{phase}_schedule") == "cosine":
        lr *= (1 + math.cos(math.pi * client.when.round / client.when.rounds)) / 2
    return replace(client.settings, lr=lr, epochs=epochs)


def with_buffers(net: Net, base: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A base's weights with the buffers of another."""
    buffers = {name for name, _ in net.base.named_buffers()}
    return {name: other[name] if name in buffers else tensor for name, tensor in base.items()}


def kept_constants(client: Client, inbox: Inbox) -> dict[str, Tensor]:
    """What the loss needs to keep scores: the broadcast adapter and head, and a mask of the remembered classes that the
    client has no data of. Without any, the weight is 0."""
    old = tuple(y for y in inbox["memory"].labels if y not in client.labels) if "memory" in inbox else ()
    adapter = {f"start_{k}": t for k, t in inbox["adapter"].tensors.items()}
    head = inbox["head"].tensors["weight"]
    mask = client.allowed(old or client.labels)
    return adapter | {"start_head": head, "kept": mask, "keep_scores": head.new_full((), float(bool(old)))}


def fresh_projector(client: Client) -> dict[str, Tensor]:
    """A new auxiliary head, the same for all clients in this round, and discarded after the phase."""
    rng = torch_generator(client.seed, "projector", client.when.position, client.when.round)
    bound = client.net.features**-0.5
    shapes = {k: v.shape for k, v in client.net.projector.items()}
    drawn = {k: torch.empty(shape).uniform_(-bound, bound, generator=rng) for k, shape in shapes.items()}
    return {k: client.tensor(v) for k, v in drawn.items()}


def bank_of(block: Block) -> Bank:
    return Bank(block.labels, block.tensors["mean"], block.tensors["spread"], block.tensors["count"])


def block_of(bank: Bank) -> Block:
    return Block("memory", {"mean": bank.mean, "spread": bank.spread, "count": bank.count}, bank.labels)


def moments_of(block: Block) -> Moments:
    return Moments(block.labels, block.tensors["mean"], block.tensors["second"], block.tensors["count"])


def block_of_moments(m: Moments) -> Block:
    return Block("statistics", {"mean": m.mean, "second": m.second, "count": m.count}, m.labels)


METHOD = Pro
