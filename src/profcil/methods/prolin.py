"""PRO-LIN, linear projected memory: the base keeps learning, and head and memory follow it in closed form.

Our own method, in the spirit of PRO: aggregated statistics only, no raw data, no generator, no gradient on the server.
It answers three weaknesses of rehearsal from diagonal Gaussians: a base that hardly moves, memories that go stale when
it does, and a head at the level of nearest means.

The server keeps, for every class, a count and a mean of base features, and one second-moment matrix G of ũ = [u; 1].
A position opens with statistics of the classes not held yet, under the broadcast base; from these and the memory the
server solves a linear discriminant head, which stays fixed while all rounds train the base against it (with a pull
towards the features of the position's starting base, and a proximal term). It closes with statistics under the final
base, of everyone who takes part once that has settled, and with sums that tell how current features moved: one ridge
regression carries every old mean and G along. The deployed head is the same closed form, less shrunk.

The warmed base serves as an anchor: memory and deployed head are over z = [u; a], the features u that move and a of the
warmed base, which never do. What is remembered of a is exact for ever, however far the base moves, and so is what is
remembered of random ReLU features of it, which widen it. The linear map reads both and moves u; the position's head
sees u alone. With `anchor_every`, the base that a position starts from joins the anchors. At that moment its features
are u itself, so nothing has to be measured: what is known of u is known of it, and stays so however far u moves on. The
price is a base more to keep, and to compute when predicting.

A `sketch` of the inputs may stand beside: random ReLU features of pixels, words or neighbourhoods, in which no base
has a part. It is as exact for ever, and tells the closed form what a base that was warmed without labels throws away.

Each ablation is a setting: `transport`, `base_rounds = 0` (pure LDA or ridge on the warmed base), `anchor`,
`anchor_every`, `closed_form`, `random_features`, `sketch`, `distill = 0`, `classifier`, `inertia`. A matrix of few
examples reveals features, the more the wider it is, and one of a sketch the inputs themselves: `min_support` holds such
statistics back, and a deployment would add secure summation.

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
PASSING = ("start", "linear", "heard", "told", "went")  # blocks that live for a position


@dataclass(frozen=True)
class ProLinParams(Checked):
    """Settings of PRO-LIN."""

    base_rounds: int = setting(
        -1,
        "rounds of a position in which the base moves; -1 = all, 0 = never, a closed form on the warmed base",
        low=-1,
    )
    closed_form: str = setting("lda", "how heads are solved from the statistics", choices=("lda", "ridge"))
    shrink: float = setting(0.3, "λ of the head that a position trains against, in mean variances", low=0.0)
    shrink_deployed: float = setting(0.05, "λ of the deployed head, in mean variances", low=0.0)
    scale: float = setting(0.2, "factor on the logits of the head that a position trains against", low=0.0)
    classifier: str = setting(
        "fixed",
        "the head within a position: fixed, trained along with the base, or solved anew after each round",
        choices=("fixed", "free", "rounds"),
    )
    distill: float = setting(0.1, "weight of the pull towards the starting base's features", low=0.0)
    proximal: float = setting(0.01, "λ of the pull towards the broadcast base", low=0.0)
    inertia: float = setting(
        0.0,
        "weight of an example that moved the base earlier against one of this position when it steps back at the end; "
        "0 = it stays where it came to",
        low=0.0,
    )
    transport: str = setting(
        "linear",
        "how old memory follows the aggregated base: a linear map, the nearest current features, or not at all",
        choices=("linear", "neighbours", "none"),
    )
    ridge: float = setting(0.1, "regularisation of the linear map, as a part of its diagonal", low=0.0)
    neighbours: int = setting(5, "K: current features that speak for an old mean", low=1)
    bandwidth: float = setting(1.0, "their bandwidth, as a multiple of the median distance", low=1e-6)
    anchor: bool = setting(True, "whether memory and deployed head see the warmed base's features beside the present")
    anchor_every: int = setting(
        0, "positions between further anchors, which are the base of that time; 0 = the warmed base alone", low=0
    )
    random_features: int = setting(
        0, "random ReLU features of the warmed base beside its own; 0 = none", low=0, high=WIDEST
    )
    sketch: int = setting(
        0, "random ReLU features of the inputs themselves beside the base's; 0 = none", low=0, high=WIDEST
    )
    min_support: int = setting(
        1, "classes of which a client has fewer examples than this are left out of its statistics", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("random_features", "anchor_every"):
            if getattr(self, name) and self.base_rounds and not self.anchor:
                raise ConfigError(
                    f"{name} = {getattr(self, name)} needs the anchor, which anchor = false leaves out; set one of "
                    f"them back, or base_rounds = 0"
                )


class ProLin(Method):
    """PRO-LIN."""

    Params = ProLinParams
    kinds = frozenset({"model", "memory", "statistics", "transport"})

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """A place for the position's starting base."""
        if self.params.distill:
            net.attach("start", copy.deepcopy(net.base))

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """Trains the base on the examples whose classes the head knows; without any, there is nothing to do."""
        known = inbox["linear"].labels if "linear" in inbox else ()
        allowed = client.allowed(known)
        rows = torch.nonzero(allowed[client.y]).flatten()
        if not len(rows):
            return Reply(client.id, 0)
        done = yield self.fit(client, inbox, rows, allowed)
        return replace(reply(client, done.weights, self.trained, loss=done.loss), samples=len(rows))

    def fit(self, client: Client, inbox: Inbox, rows: Tensor, allowed: Tensor) -> Train:
        head = inbox["linear"]
        ids = ids_of(head)
        constants = {"allowed": allowed, **dense(head, ids, client.net.classes)}
        weights = {b: dict(inbox[b].tensors) for b in self.trained}
        if self.params.distill:
            start = (inbox.get("start") or inbox["base"]).tensors
            weights["start"] = {k: client.keep(t) for k, t in start.items()}
        if self.anchored:
            every = self.params.anchor_every
            held = 1 + (client.when.position // every if every else 0)
            client.extra_bytes += held * inbox["base"].bytes  # the anchors, which it holds for surveys
        source = Shuffled(client.current[rows], client.y[rows])
        phase = client.train("fit", weights, self.trained, self.fit_loss, source, proximal=self.params.proximal)
        return replace(phase, inputs=client.examples.inputs, constants=constants)

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        """Cross-entropy of the given head over base features, and 0.1·‖h(x) − h_g(x)‖². The starting base sees the same
        views in the same mode: a target from plain inputs would itself drag the features of augmented ones along."""
        views = net.weak(batch["inputs"], batch["rng"])
        u = net.base(*views)
        weight = net.head["weight"] if self.params.classifier == "free" else batch["weight"]
        logits = F.linear(u, weight, batch["bias"])
        loss = cross_entropy(logits, batch["y"], batch["allowed"])
        if not self.params.distill:
            return loss
        with torch.no_grad():
            target = net.start(*views)  # type: ignore[operator]
        return loss + self.params.distill * (u - target).square().sum(-1).mean(-1)

    @property
    def trained(self) -> tuple[str, ...]:
        return ("base", "head") if self.params.classifier == "free" else ("base",)

    # -- statistics ---------------------------------------------------------------------------------------------------

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Opening a position: the classes not held yet. Closing it: all current ones, and how their features moved.
        Examples of a class with too few of them are in no sum at all, so that differences tell nothing either."""
        if "heard" in inbox and client.id in inbox["heard"].tensors["clients"]:
            return Reply(client.id, len(client.current))
        rows, features = linear.supported(client.y, self.params.min_support), self.seen(inbox, client.features)
        if "known" in inbox:
            rows &= ~client.allowed(inbox["known"].labels)[client.y]
        sent: dict[str, Block] = {}
        if bool(rows.any()):
            sent["statistics"] = block_of_summary(linear.summarise(features[rows], client.y[rows], packed=True))
            begun = inbox.get("start") or inbox.get(kept_at(client.when))
            if begun and self.params.transport != "none":
                moved, rest = features[rows].tensor_split([client.net.features], 1)
                before = torch.cat([client.features(begun)[rows], rest], 1)
                sent |= self.movement(inbox, before, moved)
        return Reply(client.id, len(client.current), sent)

    def movement(self, inbox: Inbox, before: Tensor, after: Tensor) -> dict[str, Block]:
        """The drift of current features under the aggregated model, as sums or as one shift a remembered class."""
        p, d = self.params, after.shape[1]
        if p.transport == "linear":
            given = before.shape[1] - self.drawn
            return {"transport": block_of_drift(linear.drift(before[:, :given], after, packed=True))}
        bank = inbox["bank"]
        if not bank.labels:
            return {}
        old = bank.tensors["mean"][:, :d]
        moves = local_transport(old, before[:, :d], after, neighbours=p.neighbours, factor=p.bandwidth)
        return {"transport": Block("transport", dict(zip(("shift", "confidence"), moves, strict=True)), bank.labels)}

    def seen(self, blocks: Mapping[str, Block], under: Callable[[Lens], Tensor]) -> Tensor:
        """z = [u; a] of some examples, which `under` looks at through bases; of a base that never moves, u alone.
        Random features come last, of the warmed base and of the inputs."""
        z = [under(blocks[name]) for name in ("base", *anchors(blocks))]
        if self.params.random_features:
            warmed = z[1] if self.anchored else z[0]
            z.append(F.linear(warmed, self.directions(warmed.shape[1], warmed.device)).relu())
        if self.params.sketch:
            z.append(under(lambda net, inputs: net.sketch(inputs, self.params.sketch)))
        return torch.cat(z, 1)

    def directions(self, d: int, device: torch.device) -> Tensor:
        """The random directions; everyone can draw them, so they never travel."""
        rng = torch_generator(0, "random features", d)
        return (torch.randn(self.params.random_features, d, generator=rng) / d**0.5).to(device)

    @property
    def drawn(self) -> int:
        """How many of z's features are random."""
        return self.params.random_features + self.params.sketch

    @property
    def anchored(self) -> bool:
        return self.params.anchor and self.params.base_rounds != 0

    # -- the server ---------------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        scale = weights["adapter"]["scale"]
        state = super().begin({b: weights[b] for b in MODEL})
        if self.anchored:
            state = state.put(anchor=Block("memory", weights["base"]))
        z = scale.new_zeros(0, len(scale) * (2 if self.anchored else 1) + self.drawn)
        return remember(state, linear.summarise(z, scale.new_zeros(0).long()))

    def plastic(self, when: When) -> bool:
        """Whether the base moves in this round."""
        return self.params.base_rounds < 0 or when.round < self.params.base_rounds

    def settled(self, when: When) -> bool:
        """Whether the base, once this round is over, stays as it is until the position ends."""
        return when.final or not self.plastic(replace(when, round=when.round + 1))

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """In the first round the base is the starting base; later the latter is sent to whoever has not got it."""
        if not self.plastic(when):
            return ()
        return (*self.trained, "linear", *(("start",) if self.params.distill and when.round else ()))

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        trained = [r for r in replies if r.blocks]
        state = super().aggregate(state, trained, when)
        if trained and self.params.inertia:
            new = torch.tensor([sum(r.samples for r in trained)])
            state = state.put(moved=Block("memory", {"samples": new}))
        return self.stepped_back(state) if self.settled(when) and "moved" in state.blocks else state

    def stepped_back(self, state: ServerState) -> ServerState:
        """The base between where the position began and where it came to: the more has moved it before, the nearer to
        its beginning. With inertia 1 it becomes the mean of all positions' bases, each weighted by its examples: those
        of the last round in which anyone moved it."""
        new, mass = int(state.blocks["moved"].tensors["samples"]), state.get("mass")
        before = int(mass.tensors["samples"]) if mass else 0
        state = state.drop("moved").put(mass=Block("memory", {"samples": torch.tensor([before + new])}))
        if not before:
            return state
        old = self.params.inertia * before
        begun, came = (state.blocks[b].tensors for b in ("start", "base"))
        return state.put(base=Block("model", {k: begun[k].lerp(v, new / (new + old)) for k, v in came.items()}))

    def opens(self, state: ServerState, when: When) -> bool:
        """With the first round in which the base may move and anyone is there."""
        return self.plastic(when) and "start" not in state.blocks

    def surveys(self, when: When) -> bool:
        """Once the base has settled, whoever takes part in a round is heard, and nobody twice."""
        return self.settled(when) or self.params.classifier == "rounds"

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        bases = ("base", *anchors(state.blocks))
        if self.opens(state, when):
            return (*bases, "known")
        asked = {"linear": ("start",), "neighbours": ("start", "bank"), "none": ()}[self.params.transport]
        held = (name for name in asked if name != "start" or kept_at(when) not in bases)
        return (*bases, *held, *(("heard",) if "heard" in state.blocks else ()))

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        if not replies:
            return state
        if self.opens(state, when):
            return self.open(state, replies, when)
        heard = self.heard(state, replies)
        if not self.settled(when):
            return self.fix_head(state, self.closed(heard))
        return self.close(heard) if when.final else heard

    def heard(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """What clients tell of the base where it has settled, added up until the position ends."""
        spoken = [r for r in replies if "statistics" in r.blocks]
        if not spoken:
            return state
        known, told, went = ([b] if (b := state.get(name)) else [] for name in ("heard", "told", "went"))
        told += [r.blocks["statistics"] for r in spoken]
        went += [r.blocks["transport"] for r in spoken if "transport" in r.blocks]
        clients = [r.client for r in spoken] + [c for b in known for c in b.tensors["clients"].tolist()]
        ids = torch.tensor(sorted(clients), dtype=torch.int32, device=told[0].tensors["count"].device)
        state = state.put(
            heard=Block("memory", {"clients": ids}), told=block_of_summary(linear.pool(map(sums_of, told)))
        )
        return state.put(went=self.together(went)) if went else state

    def together(self, moves: Sequence[Block]) -> Block:
        """Many clients' words on how features moved, as one's."""
        if self.params.transport == "linear":
            return block_of_drift(linear.pool_drift(map(drift_sums_of, moves)))
        shifts, confidences = ([b.tensors[k] for b in moves] for k in ("shift", "confidence"))
        sums = {"shift": combine(shifts, confidences), "confidence": torch.stack(confidences).sum(0)}
        return replace(moves[0], tensors=sums)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """A position that nobody was there to close keeps what was said before."""
        return self.close(state) if {"start", "heard"} & state.blocks.keys() else state

    def close(self, state: ServerState) -> ServerState:
        """The memory takes in what was said. What lives for a position ends with it."""
        passing = [n for n in state.blocks if n in PASSING or n.startswith("opened/")]
        return remember(state.drop(*passing), self.closed(state))

    def open(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Fixes the starting base and the head; the statistics behind it stay apart until the position closes."""
        told = {f"opened/{r.client}": r.blocks["statistics"] for r in replies if "statistics" in r.blocks}
        every, base = self.params.anchor_every, state.blocks["base"].tensors
        if every and when.position and when.position % every == 0:
            told = {k: block_of_summary(self.with_anchor(state, summary_of(b))) for k, b in told.items()}
            state = remember(state, self.with_anchor(state, memory_of(state)))
            state = state.put(**{kept_at(when): Block("memory", base)})
        state = state.put(**told).also(start="base")
        return self.fix_head(state, linear.pool(chain([memory_of(state)], map(summary_of, told.values()))))

    def with_anchor(self, state: ServerState, s: Summary) -> Summary:
        """What is known of u, said of one anchor more as well: of the base as it is now."""
        d, end = len(state.blocks["adapter"].tensors["scale"]), s.mean.shape[1]
        given = end - self.drawn
        return linear.select(s, [*range(given), *range(d), *range(given, end)])

    def fix_head(self, state: ServerState, memory: Summary) -> ServerState:
        if not memory.labels:
            return state
        moving = linear.select(memory, range(len(state.blocks["adapter"].tensors["scale"])))
        weight, bias = (self.params.scale * t.float() for t in self.solve(moving, self.params.shrink))
        head = Block("model", {"weight": weight, "bias": bias}, memory.labels)
        if self.params.classifier != "free":
            return state.put(linear=head)
        like = state.blocks["head"].tensors["weight"]
        return state.put(linear=head, head=Block("model", {"weight": dense(head, ids_of(head), len(like))["weight"]}))

    def closed(self, state: ServerState) -> Summary:
        """The memory under the base as it is now. No example counts twice: what a client was heard to say replaces what
        it said when the position opened; what the others said then is carried along with the old memory."""
        heard, told = state.get("heard"), state.get("told")
        now = {f"opened/{c}" for c in heard.tensors["clients"].tolist()} if heard else set()
        gone = (summary_of(b) for n, b in state.blocks.items() if n.startswith("opened/") and n not in now)
        memory = self.moved(memory_of(state), gone, state.get("went"))
        return linear.add(memory, summary_of(told)) if told else memory

    def moved(self, old: Summary, gone: Iterable[Summary], went: Block | None) -> Summary:
        """Memory, and what joins it, carried to the present base. Neighbours speak for the memory proper alone."""
        if went and self.params.transport == "neighbours":
            old = linear.displace(old, went.tensors["shift"].double())
        memory = linear.pool(chain([old], gone))
        if went and self.params.transport == "linear":
            memory = linear.carry(memory, *linear.fit_drift(drift_of(went), self.params.ridge))
        return memory

    def solve(self, memory: Summary, shrink: float, apart: int = 0) -> tuple[Tensor, Tensor]:
        return {"lda": linear.lda, "ridge": linear.ridge}[self.params.closed_form](memory, shrink, apart)

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        """Of the features that move; the anchor's means are exact anyway."""
        bank, d = state.blocks["bank"], net.features
        rows = {**bank.tensors, "mean": bank.tensors["mean"][:, :d]}
        return {"memory": (Block("memory", rows, bank.labels), lambda z: z[:, :d])}

    def views(self, state: ServerState, under: Callable[[Lens], Tensor]) -> Tensor:
        return self.seen(state.blocks, under)

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """The deployed head; a class without statistics is never chosen over one that has them."""
        memory = memory_of(state)
        scores = features.new_full((len(features), net.classes), torch.finfo(torch.float64).min, dtype=torch.float64)
        if memory.labels:
            weight, bias = self.solve(memory, self.params.shrink_deployed, self.params.sketch)
            scores[:, list(memory.labels)] = F.linear(features.double(), weight, bias)
        return scores


def anchors(blocks: Mapping[str, Block]) -> list[str]:
    """The bases that were kept, the warmed one first and then by position."""
    return sorted((name for name in blocks if name.startswith("anchor")), key=lambda name: (len(name), name))


def kept_at(when: When) -> str:
    """The name that a position's starting base has, where it is kept."""
    return f"anchor/{when.position}"


def ids_of(head: Block) -> Tensor:
    return torch.tensor(head.labels, dtype=torch.long, device=head.tensors["bias"].device)


def dense(head: Block, ids: Tensor, classes: int) -> dict[str, Tensor]:
    """A head over all class ids; rows without statistics are zero and masked."""
    return {k: t.new_zeros(classes, *t.shape[1:]).index_copy(0, ids, t) for k, t in head.tensors.items()}


def remember(state: ServerState, memory: Summary) -> ServerState:
    """Writes the memory: class rows and matrix apart, and the labels by themselves for who needs no more."""
    rows = {"mean": memory.mean.float(), "count": memory.count.to(torch.int32)}
    return state.put(
        bank=Block("memory", rows, memory.labels),
        gram=Block("memory", {"gram": linear.pack(memory.gram)}),
        known=Block("memory", {}, memory.labels),
    )


def memory_of(state: ServerState) -> Summary:
    bank, gram = state.blocks["bank"], state.blocks["gram"]
    return summary_of(Block("memory", {**bank.tensors, **gram.tensors}, bank.labels))


def summary_of(block: Block) -> Summary:
    t = block.tensors
    return Summary(block.labels, t["count"].double(), t["mean"].double(), linear.unpack(t["gram"]))


def sums_of(block: Block) -> Summary:
    """The same with its matrix still packed, which is enough to add it to its like."""
    t = block.tensors
    return Summary(block.labels, t["count"].double(), t["mean"].double(), t["gram"])


def block_of_summary(s: Summary) -> Block:
    tensors = {"mean": s.mean.float(), "count": s.count.to(torch.int32), "gram": packed(s.gram)}
    return Block("statistics", tensors, s.labels)


def drift_of(block: Block) -> Drift:
    t = block.tensors
    return Drift(linear.unpack(t["old"]), t["cross"].double(), linear.unpack(t["square"]))


def drift_sums_of(block: Block) -> Drift:
    return Drift(*(block.tensors[k].double() for k in ("old", "cross", "square")))


def block_of_drift(d: Drift) -> Block:
    return Block("transport", {"old": packed(d.old), "cross": d.cross.float(), "square": packed(d.square)})


def packed(matrix: Tensor) -> Tensor:
    """A symmetric matrix as it is sent; one that is packed stays so."""
    return linear.pack(matrix) if matrix.dim() == 2 else matrix.float()


METHOD = ProLin
