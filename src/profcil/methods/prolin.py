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
reported, not on the order of tasks. With `anchor = false`, too, z is d(x) alone and no network is used at all: so it is
in the recipes, since on all benchmarks but Tiny-ImageNet the dictionary alone is within two points of the best, or
better. A report holds a factor of G that follows from G (`symmetric.packed_factor`): it reveals as much as G, which for
few examples is much. `min_support` withholds classes with few examples. With `uncertainty = "shrink"` the deployed head
is solved from means that are shrunk by how sure they are, for classes with few examples (docs/uncertainty.md). With
`base_rounds = 0` there may be less than the matrix: `moments = "sketch"` is G on a few common directions and its
diagonal (`memory/sketch.py`), which adds up like G and is far smaller in secure sums and on the server; `moments =
"none"` is the nearest class mean, for noise (docs/privacy.md).

This file has the reports and what the server does with them. The rounds that train the base are in
`parts/prolin_base.py`; features, memory and deployed head in `parts/prolin_memory.py`.

Loss: $`\mathcal{L} = \mathrm{CE}_C(W h(x) + b, y) + \kappa \, \mathrm{H}_O(W h_s(x) + b, W h(x) + b) + \lambda \lVert w
- w_g \rVert^2`$ with the starting base $`h_s`$; $`\kappa`$ = `keep_scores`, $`\lambda`$ = `proximal`. It moves the base
$`h`$ only.

Choose it when: accuracy matters most and second moments of features may leave a client.

Stored: on the server mean and count of every class, one second-moment matrix and the dictionary; on a client nothing of
its own, but the dictionary as it was sent. With `anchor = true` also the warmed-up base.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.late import LateStatistics, moves_since, record_move
from profcil.memory import linear, linear_drift
from profcil.memory.linear import Summary
from profcil.memory.uncertainty import older
from profcil.methods.parts import late_reports, mean_uncertainty
from profcil.methods.parts.addends import MODEL_MEANS, ClassRows, PlainSum
from profcil.methods.parts.mean_uncertainty import rows_of
from profcil.methods.parts.opening_reports import OPENING, merged_openings, store_opening, unreported
from profcil.methods.parts.prolin_base import ProLinBase
from profcil.methods.parts.prolin_settings import ProLinParams
from profcil.methods.parts.reported_clients import has_reported, put_answered, reported_clients
from profcil.methods.parts.summaries import has_report, put_summary, report, stored_summary, summary_of_report

POSITION_BLOCKS = ("starting_base", "training_head", "reported_clients", "reported", "reported_gram")


class ProLin(ProLinBase):
    """PRO-LIN."""

    Params = ProLinParams
    params: ProLinParams
    kinds = frozenset({"model", "memory", "statistics"})
    exact_kinds = frozenset({"statistics"})  # a covariance is a small difference of sums; rounded, it is not positive
    additive = MODEL_MEANS | {"class_means": ClassRows(), "second_moments": PlainSum()}

    def exposed(self, unit: str) -> str:
        """Without training nothing but sums over examples is sent, and noise can hide each of the examples."""
        if self.uncertain:
            return mean_uncertainty.REFUSED
        if self.params.moments == "sketch":
            return "a sketch of second moments is lost in noise; set params.moments = none, or full"
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
        z = self.limited(client, z)
        sent = {}
        if bool(rows.any()):
            sent = report(z[rows], client.y[rows], client.bound, client.summed, self.params.rank)
        stored = [name for name in ("anchor", "dictionary", "starting_base") if name in inbox]
        notes = {"extra_bytes": float(sum(inbox[name].bytes for name in stored))}
        return Reply(client.id, len(client.current), sent, notes=notes)

    # -- the server: opening and closing a position --------------------------------------------------------------------

    def opens(self, state: ServerState, when: When) -> bool:
        """In the first round of a position in which the base may move and clients take part."""
        return self.plastic(when) and "starting_base" not in state.blocks

    def surveys(self, when: When) -> bool:
        """Once the base is frozen, each participant reports once."""
        return self.frozen_after(when)

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        if self.opens(state, when):
            return (*self.feature_blocks, "known_classes")
        start = ("starting_base",) if self.params.transport == "linear" else ()
        return (*self.feature_blocks, *start, "reported_clients")

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
        drift = linear_drift.drift_of(fresh, moving if self.anchored else 0, moving)
        shift, residual = linear_drift.fit_drift(drift, self.params.ridge)
        carried = linear_drift.apply_drift(memory, shift, residual)
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
        report = summary_of_report(late.reply.blocks)
        if report.mean.shape[1] > width:  # with the change of features
            report = linear.select_features(report, range(width))
        for move in moves_since(state, late.version):
            report = linear_drift.apply_drift(report, move.tensors["map"], move.tensors["residual"])
        return self.put_memory(state, linear.add(self.memory(state), report))


METHOD = ProLin
