r"""PRO-BAYES, naive Bayes from class sums: the smallest memory that predicts, made for noise and secure sums.

Our own method: a dictionary of fixed features, one sum a class, no training by gradient anywhere.

    before the stream   the federation agrees on a dictionary of fixed features d(x) ≥ 0, each example's at unit length
                                                                                              (engine/dictionary.py)
    memory              per class a count n_y and the sum S_y of d(x) over its examples
    a position          every participant reports count and sum of its current classes once; the server adds them
    prediction          argmax_y Σ_j d_j(x) · log(S_yj + a), each class scaled to one size   (memory/bayes.py)

The result depends on which examples were reported, not on the order of tasks. A report has one row a class where
PRO-LIN sends second moments. So it is short, it adds up under secure sums as it is, and noise of differential privacy
is small beside it. The price is that features count as independent.

Loss: none; the prediction is $`\hat{y} = \arg\max_y \sum_j d_j(x) \log(\frac{\bar{n}}{n_y} S_{yj} + a)`$ with the mean
count $`\bar{n}`$ of classes and $`a`$ = `smoothing`.

Choose it when: every example must be hidden by noise (`privacy.unit = "example"`), or traffic matters more than the
last points of accuracy. Texts and graphs of words suit it; images do not.

Stored: on the server count and sum of every class, and the dictionary; on a client nothing of its own, but the
dictionary as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import Checked, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.client import BlockFeatures, Client, FeatureMap
from profcil.engine.late import LateStatistics
from profcil.engine.phases import Turn
from profcil.memory import bayes
from profcil.methods.base import Method
from profcil.methods.parts import solved_head
from profcil.methods.parts.addends import ClassRows
from profcil.methods.parts.reported_clients import NAME as REPORTED
from profcil.methods.parts.reported_clients import has_reported, put_answered, reported_clients
from profcil.methods.parts.summaries import has_report
from profcil.model.dictionary import TEXT_ENTRIES, Dictionary, make_dictionary
from profcil.model.net import MODEL, Net, Weights

WIDEST = 1 << 17  # features of a dictionary
LENGTH = 1.0  # of the features of an example, so that none adds more than that to a sum
CHUNK = 1024  # examples at a time: wide features in float64 take much memory
SUMS = "class_sums"


@dataclass(frozen=True)
class ProBayesParams(Checked):
    """Settings of PRO-BAYES."""

    dictionary: int = setting(4096, "fixed features of the inputs", low=1, high=WIDEST)
    text_entries: str = setting(
        "ngrams",
        "entries of a dictionary of texts: frequent words and pairs, projections of words and contexts, or hashed "
        "words and pairs, which no data has influenced",
        choices=TEXT_ENTRIES,
    )
    smoothing: float = setting(0.1, "a: added to every sum of a class of average size", low=1e-9)


class ProBayes(Method):
    """PRO-BAYES."""

    Params = ProBayesParams
    params: ProBayesParams
    kinds = frozenset({"model", "memory", "statistics"})  # the model is sent in the warm-up alone
    additive = {"class_means": ClassRows()}  # noqa: RUF012 - a constant, as in all methods

    def dictionary(self, net: Net, like: Inputs) -> Dictionary:
        p = self.params
        return make_dictionary(net.facts, like, net.vocabulary, p.dictionary, 1, p.text_entries)

    @property
    def has_base(self) -> bool:
        return False

    def exposed(self, unit: str) -> str:
        """Nothing but sums over examples is sent, and noise can hide each of the examples."""
        return "" if unit == "example" else super().exposed(unit)

    def releases(self, rounds: Sequence[When]) -> int:
        """One report a position."""
        return min(1, len(rounds))

    # -- the client ----------------------------------------------------------------------------------------------------

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return ()

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """Nothing is trained."""
        yield from ()
        return Reply(client.id, 0)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Counts and means of the current classes with enough examples, once a position."""
        if has_reported(client.id, inbox):
            return Reply(client.id, len(client.current))
        features = self.dictionary_features(inbox["dictionary"], client.features)
        rows = client.allowed(client.supported)[client.y]
        notes = {"extra_bytes": float(inbox["dictionary"].bytes)}
        if not bool(rows.any()):
            return Reply(client.id, len(client.current), notes=notes)
        labels, count, sums = bayes.class_sums(features[rows], client.y[rows])
        tensors = {"mean": (sums / count[:, None]).float(), "count": count.to(torch.int32)}
        sent = {"class_means": Block("statistics", tensors, labels, row_bound=LENGTH)}
        return Reply(client.id, len(client.current), sent, notes=notes)

    def dictionary_features(self, entries: Block, under: Callable[[FeatureMap], Tensor]) -> Tensor:
        """d(x) of some examples. `under` computes any function of their inputs."""
        compute = partial(self.compute_features, entries=entries)
        return under(BlockFeatures(compute, entries.version))

    def compute_features(self, net: Net, inputs: Inputs, entries: Block) -> Tensor:
        features = self.dictionary(net, inputs).features(dict(entries.tensors), inputs)
        return LENGTH * F.normalize(features.clamp(min=0.0), dim=1)

    # -- the server ----------------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        state = super().begin({b: weights[b] for b in MODEL})
        state = state.put(dictionary=Block("memory", weights["dictionary"]))
        like = weights["adapter"]["scale"]
        none = like.new_zeros(0, dtype=torch.float64)
        sums = like.new_zeros(0, self.params.dictionary, dtype=torch.float64)
        return state.put(**{SUMS: Block("memory", {"count": none, "sum": sums, "noise": none})})

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        return state

    def surveys(self, when: When) -> bool:
        return True

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("dictionary", REPORTED)

    def reported(self, state: ServerState) -> Collection[int]:
        return reported_clients(state)

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Adds the reports to the sums."""
        state = put_answered(state, replies)
        reports = [r for r in replies if has_report(r.blocks)]
        if not reports:
            return state
        return self.add_sums(state, reports)

    def add_sums(self, state: ServerState, reports: Sequence[Reply]) -> ServerState:
        """The state with these reports in the sums."""
        total = state.blocks[SUMS]
        for r in reports:
            total = added(total, r.blocks["class_means"])
        return state.put(**{SUMS: total})

    def end_position(self, state: ServerState, when: When) -> ServerState:
        return state.drop(REPORTED)

    def late_misfit(self) -> str:
        return ""

    def moving(self, when: When) -> Sequence[str]:
        return ()

    def add_statistics(
        self, state: ServerState, found: Sequence[LateStatistics], measured: Mapping[int, int], when: When
    ) -> ServerState:
        """Sums are added whenever they arrive: the features never change. A client whose report of an earlier position
        is late may report at this one, too."""
        now = [late.reply for late in found if late.when.position == when.position]
        earlier = [late.reply for late in found if late.when.position < when.position]
        reports = [r for r in earlier if has_report(r.blocks)]
        return self.absorb(self.add_sums(state, reports), now, when)

    # -- prediction ----------------------------------------------------------------------------------------------------

    def views(self, state: ServerState, under: Callable[[FeatureMap], Tensor]) -> Tensor:
        return self.dictionary_features(state.blocks["dictionary"], under)

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Scores of the deployed head. A class without statistics never wins over one that has them."""
        head = state.get(solved_head.NAME) or self.solve(state)
        if torch.compiler.is_exporting():  # the number of chunks depends on the number of examples
            return solved_head.scores_of(head, features, net.classes)
        return torch.cat([solved_head.scores_of(head, part, net.classes) for part in features.split(CHUNK)])

    def solve(self, state: ServerState) -> Block:
        """The head: log-rates, no biases."""
        total = state.blocks[SUMS]
        weight = total.tensors["sum"].double()
        if total.labels:
            weight = bayes.log_rates(
                total.tensors["count"], total.tensors["sum"], total.tensors["noise"], self.params.smoothing
            )
        return solved_head.solved_head(total.labels, weight, weight.new_zeros(len(weight)))

    def deployed(self, state: ServerState) -> ServerState:
        """The head in place of the sums."""
        tensors = state.blocks[SUMS].tensors
        mean = tensors["sum"] / tensors["count"].clamp(min=1.0)[:, None]
        return solved_head.deploy_head(state, self.solve(state), mean, "dictionary")

    def temperature(self, state: ServerState) -> float | None:
        return solved_head.stored_temperature(state)


def added(total: Block, report: Block) -> Block:
    """The sums with those of one report."""
    labels = tuple(sorted({*total.labels, *report.labels}))
    count = report.tensors["count"].double()
    noise = report.tensors.get("noise", torch.zeros_like(count))
    fresh = {"count": count, "sum": count[:, None] * report.tensors["mean"].double(), "noise": noise.double()}
    tensors = {}
    for name, rows in fresh.items():
        tensors[name] = rows.new_zeros(len(labels), *rows.shape[1:])
        for part, values in ((total.labels, total.tensors[name]), (report.labels, rows)):
            places = torch.tensor([labels.index(y) for y in part], dtype=torch.long, device=rows.device)
            tensors[name].index_add_(0, places, values)
    return Block("memory", tensors, labels)


METHOD = ProBayes
