"""PRO-LIN, linear projected memory: the base keeps learning, and head and memory follow it in closed form.

Our own method, based on PRO: aggregated statistics only, no raw data, no generator, no gradient on the server. It
addresses three weaknesses of rehearsal from diagonal Gaussians: a base that hardly moves, memories that become outdated
when it does, and a head that is no better than nearest class means.

The server stores a count and a mean of base features for every class, and one second-moment matrix G of ũ = [u; 1]. A
position opens with statistics of the classes that are not stored yet, under the broadcast base. From these and the
memory the server solves a linear discriminant head. The head is fixed while all rounds train the base against it, with
a distillation term towards the features of the position's starting base and a proximal term. The position closes with
statistics under the final base, from every client that takes part after the base is frozen, and with sums that describe
the drift of current features: one ridge regression moves every old mean and G. The deployed head is the same closed
form with less shrinkage.

The warmed-up base is an anchor: memory and deployed head are over z = [u; a], the moving features u and the features a
of the warmed-up base, which never change. Statistics of a stay exact however far the base moves, and so do those of
random ReLU features of a, which widen it. The linear map reads both and moves u; the position's head uses u alone. With
`anchor_every`, the base at the start of a position becomes a further anchor. At that moment its features are u itself,
so no measurement is needed: the statistics of u are copied, and stay exact from then on. The cost is one more base to
store and to compute at prediction.

A `sketch` of the inputs can be added: random ReLU features of pixels, words or neighbourhoods, computed without a base.
Its statistics are exact too, and contain what a base warmed up without labels discards.

Each ablation is a setting: `transport`, `base_rounds = 0` (pure LDA or ridge on the warmed-up base), `anchor`,
`anchor_every`, `closed_form`, `random_features`, `sketch`, `distill = 0`, `classifier`, `inertia`. A second-moment
matrix of few examples reveals their features, the more the wider it is, and one of a sketch reveals the inputs
themselves: `min_support` withholds such statistics, and a deployment should add secure summation.

Stored: on the server mean and count of every class, one second-moment matrix, and the anchors; on a client nothing of
its own, but the anchors as they were sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import Checked, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.engine.client import Client, Lens
from profcil.engine.payload import Block, Inbox, Reply, ServerState
from profcil.engine.phases import Batch, Shuffled, Train, Turn
from profcil.errors import ConfigError
from profcil.memory import linear
from profcil.memory.linear import Drift, Summary
from profcil.memory.transport import combine, local_transport
from profcil.methods.base import Method, reply
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Weights
from profcil.randomness import torch_generator

WIDEST = 20_000  # random features: their second moments take 3.2 GB
POSITION_BLOCKS = (  # removed when a position closes
    "starting_base",
    "training_head",
    "reported_clients",
    "reported_statistics",
    "reported_drift",
)
OPENING = "opening_statistics/"  # prefix of blocks by client; removed as well


@dataclass(frozen=True)
class ProLinParams(Checked):
    """Settings of PRO-LIN."""

    base_rounds: int = setting(
        -1,
        "rounds of a position in which the base moves; -1 = all, 0 = none: a closed form on the warmed-up base",
        low=-1,
    )
    closed_form: str = setting("lda", "how heads are solved from the statistics", choices=("lda", "ridge"))
    shrink: float = setting(0.3, "λ of the head that a position trains against, in units of the mean variance", low=0.0)
    shrink_deployed: float = setting(0.05, "λ of the deployed head, in units of the mean variance", low=0.0)
    scale: float = setting(0.2, "factor on the logits of the head that a position trains against", low=0.0)
    classifier: str = setting(
        "fixed",
        "the head within a position: fixed, trained with the base, or solved again after each round",
        choices=("fixed", "free", "rounds"),
    )
    distill: float = setting(0.1, "weight of the pull towards the starting base's features", low=0.0)
    proximal: float = setting(0.01, "λ of the proximal term towards the broadcast base", low=0.0)
    inertia: float = setting(
        0.0,
        "weight of an example of earlier positions relative to one of this position, when the base is interpolated "
        "between the position's start and end; 0 = no interpolation",
        low=0.0,
    )
    transport: str = setting(
        "linear",
        "how old memory follows the aggregated base: by a linear map, by the nearest current features, or not at all",
        choices=("linear", "neighbours", "none"),
    )
    ridge: float = setting(0.1, "regularisation of the linear map, as a share of its diagonal", low=0.0)
    neighbours: int = setting(5, "K: current features whose drift moves an old mean", low=1)
    bandwidth: float = setting(
        1.0, "bandwidth of the neighbours' weights, as a multiple of the median distance", low=1e-6
    )
    anchor: bool = setting(True, "whether memory and deployed head also use the features of the warmed-up base")
    anchor_every: int = setting(
        0,
        "positions between further anchors, each a copy of the base at that time; 0 = the warmed-up base alone",
        low=0,
    )
    random_features: int = setting(
        0, "additional random ReLU features of the warmed-up base; 0 = none", low=0, high=WIDEST
    )
    sketch: int = setting(0, "additional random ReLU features of the inputs themselves; 0 = none", low=0, high=WIDEST)
    min_support: int = setting(
        1, "classes with fewer examples than this on a client are left out of its statistics", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("random_features", "anchor_every"):
            if getattr(self, name) and self.base_rounds and not self.anchor:
                raise ConfigError(
                    f"{name} = {getattr(self, name)} needs the anchor, but anchor = false; set anchor = true, "
                    f"{name} = 0 or base_rounds = 0"
                )


class ProLin(Method):
    """PRO-LIN."""

    Params = ProLinParams
    params: ProLinParams
    kinds = frozenset({"model", "memory", "statistics", "transport"})

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """Adds a second base for distillation: the position's starting base."""
        if self.params.distill:
            net.attach("starting_base", copy.deepcopy(net.base))

    # -- the client's turn --------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """Trains the base on the examples whose classes the head has; without any, the reply is empty."""
        known = inbox["training_head"].labels if "training_head" in inbox else ()
        allowed = client.allowed(known)
        rows = client.tensor([i for i, label in enumerate(client.y_list) if label in known])
        if not len(rows):
            return Reply(client.id, 0)
        done = yield self.fit(client, inbox, rows, allowed)
        return replace(reply(client, done.weights, self.trained, loss=done.loss), samples=len(rows))

    def fit(self, client: Client, inbox: Inbox, rows: Tensor, allowed: Tensor) -> Train:
        """Training of the base against the position's head."""
        head = inbox["training_head"]
        constants = {"allowed": allowed, **dense_head(head, class_ids(head), client.net.classes)}
        weights = {b: dict(inbox[b].tensors) for b in self.trained}
        if self.params.distill:
            start = (inbox.get("starting_base") or inbox["base"]).tensors
            weights["starting_base"] = {k: client.keep(t) for k, t in start.items()}
        if self.anchored:
            every = self.params.anchor_every
            anchors = 1 + (client.when.position // every if every else 0)
            client.extra_bytes += anchors * inbox["base"].bytes  # a client stores the anchors for surveys
        source = Shuffled(client.current[rows], client.y[rows])
        phase = client.train("fit", weights, self.trained, self.fit_loss, source, proximal=self.params.proximal)
        return replace(phase, inputs=client.examples.inputs, constants=constants)

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        """Cross-entropy of the given head on base features, and distill·‖h(x) − h_g(x)‖².

        The starting base sees the same views in the same mode: with targets from plain inputs, the distillation term
        would itself move the features of augmented inputs.
        """
        views = net.weak(batch["inputs"], batch["rng"])
        u = net.base(*views)
        weight = net.head["weight"] if self.params.classifier == "free" else batch["weight"]
        logits = F.linear(u, weight, batch["bias"])
        loss = cross_entropy(logits, batch["y"], batch["allowed"])
        if not self.params.distill:
            return loss
        with torch.no_grad():
            target = net.starting_base(*views)  # type: ignore[operator]
        distance: Tensor = (u - target).square().sum(-1).mean(-1)
        return loss + self.params.distill * distance

    @property
    def trained(self) -> tuple[str, ...]:
        """The blocks that clients train."""
        return ("base", "head") if self.params.classifier == "free" else ("base",)

    # -- the statistics of a client -----------------------------------------------------------------------------------

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """At the opening of a position: statistics of the classes that are not stored yet. At its close: statistics of
        all current classes, and the drift of their features.

        Examples of a class with too few of them are in none of the sums, so that differences of sums do not reveal them
        either.
        """
        if "reported_clients" in inbox and client.id in inbox["reported_clients"].tensors["clients"]:
            return Reply(client.id, len(client.current))
        rows = linear.support_mask(client.y, self.params.min_support)
        features = self.joint_features(inbox, client.features)
        if "known_classes" in inbox:
            rows &= ~client.allowed(inbox["known_classes"].labels)[client.y]
        sent: dict[str, Block] = {}
        if bool(rows.any()):
            sent["statistics"] = block_of_summary(linear.summarise(features[rows], client.y[rows], packed=True))
            start = inbox.get("starting_base") or inbox.get(anchor_name(client.when))
            if start and self.params.transport != "none":
                moved, rest = features[rows].tensor_split([client.net.features], 1)
                before = torch.cat([client.features(start)[rows], rest], 1)
                sent |= self.drift_report(inbox, before, moved)
        return Reply(client.id, len(client.current), sent)

    def drift_report(self, inbox: Inbox, before: Tensor, after: Tensor) -> dict[str, Block]:
        """The drift of current features under the aggregated model: sums, or one shift per remembered class."""
        p = self.params
        d = after.shape[1]
        if p.transport == "linear":
            width = before.shape[1] - self.random_width
            return {"transport": block_of_drift(linear.measure_drift(before[:, :width], after, packed=True))}
        bank = inbox["bank"]
        if not bank.labels:
            return {}
        means = bank.tensors["mean"][:, :d]
        shift, confidence = local_transport(means, before[:, :d], after, neighbours=p.neighbours, factor=p.bandwidth)
        return {"transport": Block("transport", {"shift": shift, "confidence": confidence}, bank.labels)}

    def joint_features(self, blocks: Mapping[str, Block], under: Callable[[Lens], Tensor]) -> Tensor:
        """z = [u; a] of some examples; u alone if the base never moves. Random features of the warmed-up base and of
        the inputs come last. `under` computes features of the examples under a base."""
        z = [under(blocks[name]) for name in ("base", *anchor_names(blocks))]
        if self.params.random_features:
            warmed = z[1] if self.anchored else z[0]
            z.append(F.linear(warmed, self.random_directions(warmed.shape[1], warmed.device)).relu())
        if self.params.sketch:
            z.append(under(lambda net, inputs: net.sketch(inputs, self.params.sketch)))
        return torch.cat(z, 1)

    def random_directions(self, d: int, device: torch.device) -> Tensor:
        """The directions of the random features. Server and clients draw the same ones, so they are never sent."""
        rng = torch_generator(0, "random features", d)
        directions: Tensor = torch.randn(self.params.random_features, d, generator=rng) / d**0.5
        return directions.to(device)

    @property
    def random_width(self) -> int:
        """The number of random features in z."""
        return self.params.random_features + self.params.sketch

    @property
    def anchored(self) -> bool:
        """Whether z has features of the warmed-up base."""
        return self.params.anchor and self.params.base_rounds != 0

    # -- the server ---------------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        scale = weights["adapter"]["scale"]
        state = super().begin({b: weights[b] for b in MODEL})
        if self.anchored:
            state = state.put(anchor=Block("memory", weights["base"]))
        z = scale.new_zeros(0, len(scale) * (2 if self.anchored else 1) + self.random_width)
        return put_memory(state, linear.summarise(z, scale.new_zeros(0).long()))

    def plastic(self, when: When) -> bool:
        """Whether the base moves in this round."""
        return self.params.base_rounds < 0 or when.round < self.params.base_rounds

    def frozen_after(self, when: When) -> bool:
        """Whether the base is frozen from the end of this round to the end of the position."""
        return when.final or not self.plastic(replace(when, round=when.round + 1))

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """In the first round the base is the starting base; in later rounds the starting base is needed too."""
        if not self.plastic(when):
            return ()
        start = ("starting_base",) if self.params.distill and when.round else ()
        return (*self.trained, "training_head", *start)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        trained = [r for r in replies if r.blocks]
        state = super().aggregate(state, trained, when)
        if trained and self.params.inertia:
            samples = torch.tensor([sum(r.samples for r in trained)])
            state = state.put(position_samples=Block("memory", {"samples": samples}))
        if self.frozen_after(when) and "position_samples" in state.blocks:
            return self.interpolate_base(state)
        return state

    def interpolate_base(self, state: ServerState) -> ServerState:
        """Interpolates the base between the start and the end of the position. The more examples have moved it in
        earlier positions, the nearer it stays to the start. With inertia 1 it is the mean of the bases of all
        positions, each weighted by its examples: those of the last round in which the base was trained."""
        new = int(state.blocks["position_samples"].tensors["samples"])
        past = state.get("past_samples")
        before = int(past.tensors["samples"]) if past else 0
        total = Block("memory", {"samples": torch.tensor([before + new])})
        state = state.drop("position_samples").put(past_samples=total)
        if not before:
            return state
        old = self.params.inertia * before
        start = state.blocks["starting_base"].tensors
        end = state.blocks["base"].tensors
        return state.put(base=Block("model", {k: start[k].lerp(v, new / (new + old)) for k, v in end.items()}))

    def opens(self, state: ServerState, when: When) -> bool:
        """In the first round of a position in which the base may move and clients take part."""
        return self.plastic(when) and "starting_base" not in state.blocks

    def surveys(self, when: When) -> bool:
        """Once the base is frozen, each participant is surveyed once."""
        return self.frozen_after(when) or self.params.classifier == "rounds"

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        bases = ("base", *anchor_names(state.blocks))
        if self.opens(state, when):
            return (*bases, "known_classes")
        needed = {"linear": ("starting_base",), "neighbours": ("starting_base", "bank"), "none": ()}
        others = [
            name
            for name in needed[self.params.transport]
            if name != "starting_base" or anchor_name(when) not in bases  # then it is sent as an anchor
        ]
        reported = ("reported_clients",) if "reported_clients" in state.blocks else ()
        return (*bases, *others, *reported)

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        if not replies:
            return state
        if self.opens(state, when):
            return self.open_position(state, replies, when)
        state_with_reports = self.add_reports(state, replies)
        if not self.frozen_after(when):
            return self.solve_training_head(state, self.memory_now(state_with_reports))
        return self.close_position(state_with_reports) if when.final else state_with_reports

    def add_reports(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Sums the reports under the frozen base until the position ends."""
        reporting = [r for r in replies if "statistics" in r.blocks]
        if not reporting:
            return state
        statistics = stored(state, "reported_statistics") + [r.blocks["statistics"] for r in reporting]
        drifts = stored(state, "reported_drift")
        drifts += [r.blocks["transport"] for r in reporting if "transport" in r.blocks]
        clients = [r.client for r in reporting]
        for block in stored(state, "reported_clients"):
            clients += block.tensors["clients"].tolist()
        ids = torch.tensor(sorted(clients), dtype=torch.int32, device=statistics[0].tensors["count"].device)
        state = state.put(
            reported_clients=Block("memory", {"clients": ids}),
            reported_statistics=block_of_summary(linear.pool(map(packed_summary_of, statistics))),
        )
        return state.put(reported_drift=self.pool_drifts(drifts)) if drifts else state

    def pool_drifts(self, reports: Sequence[Block]) -> Block:
        """The drift reports of several clients as one report."""
        if self.params.transport == "linear":
            return block_of_drift(linear.pool_drift(map(packed_drift_of, reports)))
        shifts = [b.tensors["shift"] for b in reports]
        confidences = [b.tensors["confidence"] for b in reports]
        sums = {"shift": combine(shifts, confidences), "confidence": torch.stack(confidences).sum(0)}
        return replace(reports[0], tensors=sums)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """Closes a position that had no participants in its last round."""
        return self.close_position(state) if {"starting_base", "reported_clients"} & state.blocks.keys() else state

    def close_position(self, state: ServerState) -> ServerState:
        """Adds the reports to the memory, and removes the blocks of the position."""
        temporary = [n for n in state.blocks if n in POSITION_BLOCKS or n.startswith(OPENING)]
        return put_memory(state.drop(*temporary), self.memory_now(state))

    def open_position(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Stores the starting base and solves the head. The opening statistics stay separate from the memory until the
        position closes."""
        opening = {f"{OPENING}{r.client}": r.blocks["statistics"] for r in replies if "statistics" in r.blocks}
        every = self.params.anchor_every
        base = state.blocks["base"].tensors
        if every and when.position and when.position % every == 0:
            opening = {k: block_of_summary(self.with_anchor(state, summary_of(b))) for k, b in opening.items()}
            state = put_memory(state, self.with_anchor(state, memory_of(state)))
            state = state.put(**{anchor_name(when): Block("memory", base)})
        state = state.put(**opening).also(starting_base="base")
        memory = linear.pool(chain([memory_of(state)], map(summary_of, opening.values())))
        return self.solve_training_head(state, memory)

    def with_anchor(self, state: ServerState, s: Summary) -> Summary:
        """The summary with the present base as one more anchor: the statistics of u are copied."""
        d = len(state.blocks["adapter"].tensors["scale"])
        end = s.mean.shape[1]
        given = end - self.random_width
        return linear.select_features(s, [*range(given), *range(d), *range(given, end)])

    def solve_training_head(self, state: ServerState, memory: Summary) -> ServerState:
        """The state with the head that the position trains against, solved from the moving features."""
        if not memory.labels:
            return state
        moving = linear.select_features(memory, range(len(state.blocks["adapter"].tensors["scale"])))
        weight, bias = (self.params.scale * t.float() for t in self.solve(moving, self.params.shrink))
        head = Block("model", {"weight": weight, "bias": bias}, memory.labels)
        if self.params.classifier != "free":
            return state.put(training_head=head)
        classes = len(state.blocks["head"].tensors["weight"])
        dense = dense_head(head, class_ids(head), classes)
        return state.put(training_head=head, head=Block("model", {"weight": dense["weight"]}))

    def memory_now(self, state: ServerState) -> Summary:
        """The memory under the present base. No example counts twice: the report of a client replaces its opening
        statistics. Opening statistics of clients without a report are transported with the old memory."""
        reported = state.get("reported_clients")
        statistics = state.get("reported_statistics")
        replaced = {f"{OPENING}{c}" for c in reported.tensors["clients"].tolist()} if reported else set()
        unreported = (summary_of(b) for n, b in state.blocks.items() if n.startswith(OPENING) and n not in replaced)
        memory = self.transport_memory(memory_of(state), unreported, state.get("reported_drift"))
        return linear.add(memory, summary_of(statistics)) if statistics else memory

    def transport_memory(self, old: Summary, unreported: Iterable[Summary], drift: Block | None) -> Summary:
        """The memory and further summaries, pooled and moved to the present base. Neighbours move the old memory
        only."""
        if drift and self.params.transport == "neighbours":
            old = linear.shift_means(old, drift.tensors["shift"].double())
        memory = linear.pool(chain([old], unreported))
        if drift and self.params.transport == "linear":
            memory = linear.apply_drift(memory, *linear.fit_drift(drift_of(drift), self.params.ridge))
        return memory

    def solve(self, memory: Summary, shrink: float, last: int = 0) -> tuple[Tensor, Tensor]:
        """Weight and bias of the closed form that the settings choose."""
        return {"lda": linear.lda, "ridge": linear.ridge}[self.params.closed_form](memory, shrink, last)

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        """The means of the moving features; those of the anchors are exact."""
        bank = state.blocks["bank"]
        d = net.features
        rows = {**bank.tensors, "mean": bank.tensors["mean"][:, :d]}
        return {"memory": (Block("memory", rows, bank.labels), lambda z: z[:, :d])}

    def views(self, state: ServerState, under: Callable[[Lens], Tensor]) -> Tensor:
        return self.joint_features(state.blocks, under)

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Scores of the deployed head. A class without statistics never wins over one that has them."""
        memory = memory_of(state)
        scores = features.new_full((len(features), net.classes), torch.finfo(torch.float64).min, dtype=torch.float64)
        if memory.labels:
            weight, bias = self.solve(memory, self.params.shrink_deployed, self.params.sketch)
            scores[:, list(memory.labels)] = F.linear(features.double(), weight, bias)
        return scores


def anchor_names(blocks: Mapping[str, Block]) -> list[str]:
    """The names of the anchors: the warmed-up base, then the others by position."""
    return sorted((name for name in blocks if name.startswith("anchor")), key=lambda name: (len(name), name))


def anchor_name(when: When) -> str:
    """The name of a position's starting base as an anchor."""
    return f"anchor/{when.position}"


def class_ids(head: Block) -> Tensor:
    """The class ids of a head's rows."""
    return torch.tensor(head.labels, dtype=torch.long, device=head.tensors["bias"].device)


def dense_head(head: Block, ids: Tensor, classes: int) -> dict[str, Tensor]:
    """A head over all class ids; rows without statistics are zero."""
    return {k: t.new_zeros(classes, *t.shape[1:]).index_copy(0, ids, t) for k, t in head.tensors.items()}


def stored(state: ServerState, name: str) -> list[Block]:
    """A list with a block of the state, empty if there is none."""
    block = state.get(name)
    return [block] if block else []


def put_memory(state: ServerState, memory: Summary) -> ServerState:
    """Stores the memory: class rows and matrix in separate blocks, and the labels alone for opening surveys."""
    rows = {"mean": memory.mean.float(), "count": memory.count.to(torch.int32)}
    return state.put(
        bank=Block("memory", rows, memory.labels),
        gram=Block("memory", {"gram": linear.pack(memory.gram)}),
        known_classes=Block("memory", {}, memory.labels),
    )


def memory_of(state: ServerState) -> Summary:
    """The stored memory."""
    bank = state.blocks["bank"]
    gram = state.blocks["gram"]
    return summary_of(Block("memory", {**bank.tensors, **gram.tensors}, bank.labels))


def summary_of(block: Block) -> Summary:
    """The summary in a block."""
    t = block.tensors
    return Summary(block.labels, t["count"].double(), t["mean"].double(), linear.unpack(t["gram"]))


def packed_summary_of(block: Block) -> Summary:
    """The same with its matrix still packed, which is enough for sums."""
    t = block.tensors
    return Summary(block.labels, t["count"].double(), t["mean"].double(), t["gram"])


def block_of_summary(s: Summary) -> Block:
    """The block of a summary."""
    tensors = {"mean": s.mean.float(), "count": s.count.to(torch.int32), "gram": pack_if_square(s.gram)}
    return Block("statistics", tensors, s.labels)


def drift_of(block: Block) -> Drift:
    """The drift in a block."""
    t = block.tensors
    return Drift(linear.unpack(t["old"]), t["cross"].double(), linear.unpack(t["square"]))


def packed_drift_of(block: Block) -> Drift:
    """The same with its matrices still packed."""
    return Drift(*(block.tensors[k].double() for k in ("old", "cross", "square")))


def block_of_drift(d: Drift) -> Block:
    """The block of a drift."""
    tensors = {"old": pack_if_square(d.old), "cross": d.cross.float(), "square": pack_if_square(d.square)}
    return Block("transport", tensors)


def pack_if_square(matrix: Tensor) -> Tensor:
    """A symmetric matrix in the packed form that is sent; a packed one stays packed."""
    return linear.pack(matrix) if matrix.dim() == 2 else matrix.float()


METHOD = ProLin
