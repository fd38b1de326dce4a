r"""PRO-LIN, linear projected memory: closed-form heads from sums, over a moving base and a fixed dictionary.

Our own method, based on PRO: aggregated statistics only, no raw data, no generator, no gradient on the server.

    before the stream   the federation agrees on a dictionary of fixed features d(x)        (engine/dictionary.py)
    features            z = [h(x); h_0(x); d(x)]: moving base, warmed-up base, dictionary
    memory              per class a count and a mean of z; one second-moment matrix G of [z; 1]
    a position opens    clients report z of classes that are not in memory yet; the server solves a linear
                        discriminant head (W, b) over h(x), which is fixed during the position
    its rounds          clients train the base: cross-entropy of (W, b) over their own classes, and
                        keep_scores · H(softmax_O(W h_s(x) + b), softmax_O(W h(x) + b)) with the starting base h_s
                        and the classes O that the head has and the client has no data of
    it closes           clients report z and δ = h(x) − h_s(x); a ridge regression of δ on [h_s(x); h_0(x); 1] moves
                        all older means and G to the new base; the reports are added
    prediction          a linear discriminant head over z

So there are three ideas: heads in closed form, a base that moves but keeps its scores, and a memory that is carried by
one linear map. With `base_rounds = 0` nothing is trained by gradient, and the result depends on which examples were
reported, not on the order of tasks. A report holds a factor of G that follows from G (`linear.packed_factor`): it
reveals as much as G, which for few examples is much. `min_support` withholds classes with few examples. With
`uncertainty = "shrink"` the deployed head is solved from means that are shrunk by how sure they are, for classes with
few examples (docs/uncertainty.md).

Loss: $`\mathcal{L} = \mathrm{CE}_C(W h(x) + b, y) + \kappa \, \mathrm{H}_O(W h_s(x) + b, W h(x) + b) + \lambda \lVert w
- w_g \rVert^2`$ with the starting base $`h_s`$; $`\kappa`$ = `keep_scores`, $`\lambda`$ = `proximal`. It moves the base
$`h`$ only.

Choose it when: accuracy matters most and second moments of features may leave a client.

Stored: on the server mean and count of every class, one second-moment matrix, dictionary and warmed-up base; on a
client nothing of its own, but dictionary and warmed-up base as they were sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import Checked, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.client import BlockFeatures, Client, Lens
from profcil.engine.late import LateStatistics, moves_since, record_move
from profcil.engine.phases import Batch, Shuffled, Train, Turn
from profcil.memory import linear
from profcil.memory.linear import Summary
from profcil.memory.uncertainty import ShrunkHead, fresh_dispersion, mean_variance, older, shrunk_discriminants
from profcil.methods.base import Method, reply
from profcil.methods.parts import late_reports, mean_uncertainty, solved_head
from profcil.methods.parts.addends import MODEL_MEANS, ClassRows, PlainSum
from profcil.methods.parts.inertia import count_examples, interpolate_base
from profcil.methods.parts.reported_clients import has_reported, put_answered, reported_clients
from profcil.methods.parts.summaries import has_report, put_summary, report, stored_summary, summary_of_report
from profcil.model.dictionary import TEXT_ENTRIES, Dictionary, make_dictionary
from profcil.model.losses import cross_entropy, soft_cross_entropy
from profcil.model.net import MODEL, Net, Weights

WIDEST = 20_000  # features of a dictionary: their second moments take 3.2 GB
OPENING = "opening/"  # prefix of the blocks of an opening report; the ids of its clients follow
POSITION_BLOCKS = ("starting_base", "training_head", "reported_clients", "reported", "reported_gram")


@dataclass(frozen=True)
class ProLinParams(Checked):
    """Settings of PRO-LIN."""

    dictionary: int = setting(0, "fixed features of the inputs; 0 = no dictionary", low=0, high=WIDEST)
    text_entries: str = setting(
        "ngrams",
        "entries of a dictionary of texts: frequent words and pairs, projections of words and contexts, or hashed "
        "words and pairs, which no data has influenced",
        choices=TEXT_ENTRIES,
    )
    base_rounds: int = setting(
        -1, "rounds of a position in which the base moves; -1 = all, 0 = none: closed forms only", low=-1
    )
    keep_scores: float = setting(2.0, "weight of keeping the starting base's scores of other classes", low=0.0)
    proximal: float = setting(0.01, "λ of the proximal term towards the broadcast base", low=0.0)
    scale: float = setting(0.2, "factor on the logits of the head that a position trains against", low=0.0)
    shrink: float = setting(0.3, "λ of the head that a position trains against, in units of the mean variance", low=0.0)
    shrink_deployed: float = setting(0.05, "λ of the deployed head, in units of the mean variance", low=0.0)
    inertia: float = setting(
        0.0, "weight of an example of earlier positions, relative to one of this, in the base; 0 = off", low=0.0
    )
    transport: str = setting(
        "linear", "how old memory follows the base: by a linear map, or not at all", choices=("linear", "none")
    )
    ridge: float = setting(0.01, "regularisation of the linear map, as a share of its diagonal", low=0.0)
    uncertainty: str = setting("off", mean_uncertainty.HELP, choices=mean_uncertainty.CHOICES)
    anchor: bool = setting(True, "whether memory and deployed head also use the features of the warmed-up base")
    min_support: int = setting(1, "older name of privacy.min_support; the larger of the two counts", low=1)


class ProLin(Method):
    """PRO-LIN."""

    Params = ProLinParams
    params: ProLinParams
    kinds = frozenset({"model", "memory", "statistics"})
    exact_kinds = frozenset({"statistics"})  # a covariance is a small difference of sums; rounded, it is not positive
    additive = MODEL_MEANS | {"class_means": ClassRows(), "second_moments": PlainSum()}

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """Adds a second base for kept scores: the position's starting base."""
        if self.params.keep_scores and self.params.base_rounds:
            net.attach("starting_base", copy.deepcopy(net.base))

    def dictionary(self, net: Net, like: Inputs) -> Dictionary | None:
        p = self.params
        if not p.dictionary:
            return None
        return make_dictionary(net.facts, like, net.vocabulary, p.dictionary, p.min_support, p.text_entries)

    def exposed(self, unit: str) -> str:
        """Without training nothing but sums over examples is sent, and noise can hide each of the examples."""
        if self.uncertain:
            return mean_uncertainty.REFUSED
        if unit == "example" and not self.params.base_rounds:
            return ""
        if unit == "client" and self.params.base_rounds and self.params.transport == "linear":
            return "a linear map that is fitted to noised sums does not exist; set params.transport = none"
        return super().exposed(unit)

    def releases(self, rounds: Sequence[When]) -> int:
        """An opening report and a turn of each round in which the base moves, and one closing report."""
        plastic = sum(self.plastic(when) for when in rounds)
        reports = any(self.surveys(when) for when in rounds)
        return plastic + bool(plastic) + reports

    # -- the client's turn: train the base against the position's head -------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """Trains the base on the examples whose classes the head has; without any, the reply is empty."""
        known = inbox["training_head"].labels if "training_head" in inbox else ()
        rows = [row for row, label in enumerate(client.y_list) if label in known]
        if not rows:
            return Reply(client.id, 0)
        done = yield self.fit(client, inbox, client.tensor(rows))
        answer = reply(client, done.weights, ("base",), loss=done.loss)
        return replace(answer, samples=len(rows))

    def fit(self, client: Client, inbox: Inbox, rows: Tensor) -> Train:
        """Training of the base against the position's head."""
        head = inbox["training_head"]
        own = tuple(label for label in client.labels if label in head.labels)
        others = tuple(label for label in head.labels if label not in client.labels)
        masks = {"allowed": client.allowed(own), "others": client.allowed(others)}
        weights = {"base": dict(inbox["base"].tensors)}
        if self.params.keep_scores:
            start = (inbox.get("starting_base") or inbox["base"]).tensors
            weights["starting_base"] = {name: client.keep(tensor) for name, tensor in start.items()}
        source = Shuffled(client.current[rows], client.y[rows])
        pull = self.params.proximal
        phase = client.train("fit", weights, ("base",), self.fit_loss, source, proximal=pull)
        ids = client.tensor(head.labels)
        constants = masks | dense_head(head, ids, client.net.classes)
        return replace(phase, inputs=client.examples.inputs, constants=constants)

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        """Cross-entropy over the client's own classes, and the kept scores of the others.

        The starting base sees the same views in the same mode: with scores of plain inputs as targets, the second term
        would itself move the features of augmented inputs.
        """
        views = net.weak(batch["inputs"], batch["rng"])
        features = net.base(*views)
        logits = F.linear(features, batch["weight"], batch["bias"])
        loss = cross_entropy(logits, batch["y"], batch["allowed"])
        if not self.params.keep_scores:
            return loss
        with torch.no_grad():
            before = net.starting_base(*views)  # type: ignore[operator]
            target = F.linear(before, batch["weight"], batch["bias"])
        kept = soft_cross_entropy(logits, target, batch["others"])
        return loss + self.params.keep_scores * kept

    # -- the client's report -------------------------------------------------------------------------------------------

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """At the opening of a position: a report of the classes that are not stored yet. At its close: a report of all
        current classes, with the change of their moving features. Each client reports once.

        Examples of a class with too few of them are in none of the sums, so that differences of sums do not reveal them
        either.
        """
        if has_reported(client.id, inbox):
            return Reply(client.id, len(client.current))
        rows = linear.support_mask(client.y, self.params.min_support) & client.allowed(client.supported)[client.y]
        if "known_classes" in inbox:
            known = client.allowed(inbox["known_classes"].labels)
            rows &= ~known[client.y]
        z = self.joint_features(inbox, client.features)
        if "starting_base" in inbox:
            change = client.features(inbox["base"]) - client.features(inbox["starting_base"])
            z = torch.cat([z, change], 1)
        z = client.bounded(z)
        sent = report(z[rows], client.y[rows], client.bound, client.summed) if bool(rows.any()) else {}
        stored = [name for name in ("anchor", "dictionary", "starting_base") if name in inbox]
        notes = {"extra_bytes": float(sum(inbox[name].bytes for name in stored))}
        return Reply(client.id, len(client.current), sent, notes=notes)

    def joint_features(self, blocks: Mapping[str, Block], under: Callable[[Lens], Tensor]) -> Tensor:
        """z of some examples. `under` computes their features under a base, or by any function of their inputs."""
        z = [under(blocks[name]) for name in ("base", "anchor") if name in blocks]
        entries = blocks.get("dictionary")
        if entries:
            compute = partial(self.dictionary_features, entries=entries)
            z.append(under(BlockFeatures(compute, entries.version)))
        return torch.cat(z, 1)

    def dictionary_features(self, net: Net, inputs: Inputs, entries: Block) -> Tensor:
        """d(x)."""
        dictionary = self.dictionary(net, inputs)
        assert dictionary is not None
        return dictionary.features(dict(entries.tensors), inputs)

    @property
    def anchored(self) -> bool:
        """Whether z has the features of the warmed-up base beside those of the moving one."""
        return self.params.anchor and self.params.base_rounds != 0

    # -- the server: rounds --------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        state = super().begin({b: weights[b] for b in MODEL})
        if self.anchored:
            state = state.put(anchor=Block("memory", weights["base"]))
        if "dictionary" in weights:
            state = state.put(dictionary=Block("memory", weights["dictionary"]))
        scale = weights["adapter"]["scale"]
        bases = 2 if self.anchored else 1
        width = bases * len(scale) + self.params.dictionary
        features = scale.new_zeros(0, width)
        labels = scale.new_zeros(0).long()
        if self.uncertain:
            state = state.put(**{mean_uncertainty.NAME: mean_uncertainty.empty_block(scale)})
        return self.put_memory(state, self.with_dispersion(linear.summarise(features, labels)))

    @property
    def uncertain(self) -> bool:
        """Whether the uncertainty of class means is stored and used."""
        return self.params.uncertainty == "shrink"

    def with_dispersion(self, s: Summary) -> Summary:
        """The summary of one client, with the dispersion of its rows where it is stored."""
        return replace(s, dispersion=fresh_dispersion(s.count)) if self.uncertain else s

    def plastic(self, when: When) -> bool:
        """Whether the base moves in this round."""
        return self.params.base_rounds < 0 or when.round < self.params.base_rounds

    def frozen_after(self, when: When) -> bool:
        """Whether the base is frozen from the end of this round to the end of the position."""
        following = replace(when, round=when.round + 1)
        return when.final or not self.plastic(following)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """In the first round the base is the starting base; in later rounds the starting base is needed too."""
        if not self.plastic(when):
            return ()
        start = ("starting_base",) if self.params.keep_scores and when.round else ()
        return ("base", "training_head", *start)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg of the base. When it stops moving, inertia holds it back."""
        trained = [r for r in replies if r.blocks]
        state = super().aggregate(state, trained, when)
        if not self.params.inertia:
            return state
        if trained:
            state = count_examples(state, trained)
        if self.frozen_after(when) and "position_samples" in state.blocks:
            state = interpolate_base(state, state.blocks["starting_base"], self.params.inertia)
        return state

    # -- the server: opening and closing a position --------------------------------------------------------------------

    def opens(self, state: ServerState, when: When) -> bool:
        """In the first round of a position in which the base may move and clients take part."""
        return self.plastic(when) and "starting_base" not in state.blocks

    def surveys(self, when: When) -> bool:
        """Once the base is frozen, each participant reports once."""
        return self.frozen_after(when)

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        fixed = ("base", "anchor", "dictionary")
        if self.opens(state, when):
            return (*fixed, "known_classes")
        start = ("starting_base",) if self.params.transport == "linear" else ()
        return (*fixed, *start, "reported_clients")

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        reports = [r for r in replies if has_report(r.blocks)]
        if self.opens(state, when):
            return self.open_position(state, reports) if replies else state
        state = put_answered(state, replies)
        return self.add_reports(state, reports) if reports else state

    def open_position(self, state: ServerState, reports: Sequence[Reply]) -> ServerState:
        """Stores the starting base and solves the head that the position trains against. Opening reports stay apart
        from the memory until the position closes."""
        state = store_opening(state, reports)
        state = state.also(starting_base="base")
        opening = (self.with_dispersion(summary_of_report(r.blocks)) for r in reports)
        memory = linear.pool(chain([self.memory(state)], opening))
        if not memory.labels:
            return state
        moving = linear.select_features(memory, range(self.moving_width(state)))
        weight, bias = linear.lda(moving, self.params.shrink)
        scale = self.params.scale
        head = {"weight": scale * weight.float(), "bias": scale * bias.float()}
        return state.put(training_head=Block("model", head, memory.labels))

    def reported(self, state: ServerState) -> Collection[int]:
        return reported_clients(state)

    def add_reports(self, state: ServerState, reports: Sequence[Reply]) -> ServerState:
        """Sums the reports under the frozen base until the position ends."""
        stored = stored_summary(state, "reported")
        earlier = [stored] if stored else []
        fresh = (self.with_dispersion(summary_of_report(r.blocks)) for r in reports)
        total = linear.pool(chain(earlier, fresh))
        if self.uncertain:
            variance = linear.within_class_variance(total)[: self.width(state)]
            state = mean_uncertainty.with_clients(state, [r.blocks["class_means"] for r in reports], variance)
        return put_summary(state, "reported", total)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """Carries the memory to the present base, adds the reports, and removes the blocks of the position.

        No example counts twice: the closing report of a client replaces its opening report. Where opening reports were
        summed, it replaces the whole sum.
        """
        opening = map(self.with_dispersion, unreported(state, reported_clients(state)))
        memory = linear.pool(chain([self.memory(state)], opening))
        if memory.dispersion is not None and "starting_base" in state.blocks:
            memory = replace(memory, dispersion=older(memory.dispersion))
        fresh = stored_summary(state, "reported")
        carries = self.params.transport == "linear" and "starting_base" in state.blocks
        state = late_reports.note_merged(state, merged_openings(state), when)
        if fresh and carries:
            state, memory, fresh = self.carry(state, memory, fresh)
        if fresh and self.uncertain:
            variance = linear.within_class_variance(fresh)
            state = mean_uncertainty.with_returns(state, rows_of(memory), rows_of(fresh), variance)
        if fresh:
            memory = linear.add(memory, fresh)
        temporary = [name for name in state.blocks if name in POSITION_BLOCKS or name.startswith(OPENING)]
        return self.put_memory(state.drop(*temporary), memory)

    def carry(self, state: ServerState, memory: Summary, fresh: Summary) -> tuple[ServerState, Summary, Summary]:
        """The memory moved to the present base by one linear map, and the reports without the change of features. The
        state records the map."""
        moving = self.moving_width(state)
        drift = linear.drift_of(fresh, moving if self.anchored else 0, moving)
        shift, residual = linear.fit_drift(drift, self.params.ridge)
        carried = linear.apply_drift(memory, shift, residual)
        width = memory.mean.shape[1]
        state = record_move(state, {"map": shift, "residual": residual})
        return state, carried, linear.select_features(fresh, range(width))

    # -- reports that arrive late (clock.mode = "buffer") -------------------------------------------------------------

    def late_misfit(self) -> str:
        return mean_uncertainty.LATE if self.uncertain else ""

    def moving(self, when: When) -> Sequence[str]:
        return ("base",) if self.plastic(when) else ()

    def memory_base(self, state: ServerState) -> str:
        """The starting base until the position ends."""
        return "starting_base" if "starting_base" in state.blocks else "base"

    def add_statistics(
        self, state: ServerState, found: Sequence[LateStatistics], measured: Mapping[int, int], when: When
    ) -> ServerState:
        """Reports of this position are added to the others. Those of earlier ones join the memory, through the maps by
        which it has been carried since."""
        for late in found:
            if not has_report(late.reply.blocks):
                continue
            if late.when.position < when.position:
                state = self.join_memory(state, late)
            elif late.opening:
                state = store_opening(state, [late.reply])
            else:
                state = self.add_reports(put_answered(state, [late.reply]), [late.reply])
        return state

    def join_memory(self, state: ServerState, late: LateStatistics) -> ServerState:
        """Adds a report of an earlier position to the memory, but for that of a client whose opening report of then is
        in it: its examples are counted."""
        if not late.opening and late_reports.is_merged(state, late):
            return state
        width = self.memory(state).mean.shape[1]
        report = linear.select_features(summary_of_report(late.reply.blocks), range(width))
        for move in moves_since(state, late.version):
            report = linear.apply_drift(report, move.tensors["map"], move.tensors["residual"])
        return self.put_memory(state, linear.add(self.memory(state), report))

    def width(self, state: ServerState) -> int:
        """The number of all features z."""
        return state.blocks["bank"].tensors["mean"].shape[1]

    def moving_width(self, state: ServerState) -> int:
        """The number of moving features."""
        return len(state.blocks["adapter"].tensors["scale"])

    def put_memory(self, state: ServerState, memory: Summary) -> ServerState:
        """Stores the memory, and its labels alone for opening reports."""
        state = put_summary(state, "bank", memory)
        return state.put(known_classes=Block("memory", {}, memory.labels))

    def memory(self, state: ServerState) -> Summary:
        """The stored memory."""
        memory = stored_summary(state, "bank")
        assert memory is not None
        return memory

    # -- prediction and diagnostics ------------------------------------------------------------------------------------

    def views(self, state: ServerState, under: Callable[[Lens], Tensor]) -> Tensor:
        return self.joint_features(state.blocks, under)

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Scores of the deployed head. A class without statistics never wins over one that has them."""
        head = state.get(solved_head.NAME)
        if head is None:
            head, _ = self.solve(state)
        return solved_head.scores_of(head, features, net.classes)

    def solve(self, state: ServerState) -> tuple[Block, Tensor]:
        """The deployed head, and the means that it was solved from."""
        memory = self.memory(state)
        if self.uncertain and memory.labels:
            head = self.solve_shrunk(memory, mean_uncertainty.sums_of(state))
            return mean_uncertainty.head_block(memory.labels, head), head.mean
        weight = memory.mean.double()
        bias = weight[:, 0]
        if memory.labels:
            weight, bias = linear.lda(memory, self.params.shrink_deployed, self.params.dictionary)
        return solved_head.solved_head(memory.labels, weight, bias, memory.bound), memory.mean

    def solve_shrunk(self, memory: Summary, sums: Tensor) -> ShrunkHead:
        """The deployed head from means whose uncertainty is known."""
        assert memory.dispersion is not None
        p = self.params
        covariance, penalty = linear.covariance_and_penalty(memory, p.shrink_deployed, p.dictionary)
        variance = mean_variance(memory.count, memory.dispersion, sums)
        penalised = linear.add_to_diagonal(covariance, penalty)
        return shrunk_discriminants(memory.mean, variance, float(memory.count.sum()), covariance, penalised)

    def deployed(self, state: ServerState) -> ServerState:
        """The solved head in place of the memory, which is larger and reveals more."""
        head, mean = self.solve(state)
        return solved_head.deploy_head(state, head, mean, "anchor", "dictionary")

    def temperature(self, state: ServerState) -> float | None:
        return solved_head.stored_temperature(state)

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        """The means of the moving features; those of the fixed ones are exact."""
        bank = state.blocks["bank"]
        d = net.features
        mean = bank.tensors["mean"][:, :d]
        moving = Block("memory", {**bank.tensors, "mean": mean}, bank.labels)
        return {"memory": (moving, lambda z: z[:, :d])}


def dense_head(head: Block, ids: Tensor, classes: int) -> dict[str, Tensor]:
    """A head over all class ids, from one over some `ids`; the other rows are zero."""
    dense = {}
    for name, rows in head.tensors.items():
        zeros = rows.new_zeros(classes, *rows.shape[1:])
        dense[name] = zeros.index_copy(0, ids, rows)
    return dense


def store_opening(state: ServerState, reports: Sequence[Reply]) -> ServerState:
    """The state with opening reports, apart from the memory."""
    for r in reports:
        clients = ",".join(map(str, r.clients))
        stored = {f"{OPENING}{clients}/{name}": block for name, block in r.blocks.items()}
        state = state.put(**stored)
    return state


def merged_openings(state: ServerState) -> set[int]:
    """The clients whose opening reports join the memory, since they have sent no closing report."""
    names = {name.split("/")[1] for name in state.blocks if name.startswith(OPENING)}
    return {int(client) for clients in names for client in clients.split(",")} - set(reported_clients(state))


def rows_of(s: Summary) -> tuple[tuple[int, ...], mean_uncertainty.Rows]:
    """The class rows of a summary with dispersion."""
    assert s.dispersion is not None
    return s.labels, (s.mean, s.count, s.dispersion)


def unreported(state: ServerState, replaced: Sequence[int]) -> Iterator[Summary]:
    """The opening reports of clients that have sent no closing report, one at a time: their matrices are large."""
    names = [name for name in state.blocks if name.startswith(OPENING) and name.endswith("/class_means")]
    for name in names:
        clients = {int(client) for client in name.split("/")[1].split(",")}
        if not clients & set(replaced):
            yield summary_of_report(state.blocks, name.removesuffix("class_means"))


METHOD = ProLin
