r"""PRO-MAX: PRO, with transport of old memories as the representation drifts.

A client computes base features of a small calibration subset before it fits its current task, and again afterwards.
Each old mean moves by the drift of the calibration features nearest to it, weighted by closeness. The client rehearses
from the moved means and sends the shifts with a confidence for each. The server applies their confidence-weighted mean.
In frozen rounds the drift in base space is exactly zero: nothing is computed or sent. In adapted space (`adapted_bank`)
the memory also follows the fitting phase of frozen rounds, if there is one.

The drift of one client is not the drift of the averaged model. With `transport = "global"` the client still rehearses
from means moved by its own drift, but the server applies shifts measured after aggregation: the drift of the same
calibration examples from the broadcast base to the aggregated one.

Beyond the paper, `transport = "linear"` carries the memory once a position, by one linear map as in PRO-LIN. When the
base is frozen, clients send sums for a ridge regression of the change of their features since the start of the position
on the features at its start. The server solves it in closed form, moves all means, and the shared covariance by the
same map, before it refreshes the classes that clients have now. Until then the server's means are those of the
position's starting base; a client rehearses from means moved by a regression on its own examples.

Loss: that of PRO, rehearsed from moved means $`m_y + \Delta_y`$ with $`\Delta_y = \sum_i \alpha_i (u'_i - u_i) / \sum_i
\alpha_i`$ and $`\alpha_i = \exp(-\lVert u_i - m_y \rVert^2 / 2\tau^2)`$ over the $`K`$ calibration features $`u_i`$
nearest to the mean, which became $`u'_i`$. The server applies $`\sum_c q_{cy} \Delta_{cy} / \sum_c q_{cy}`$ with
confidences $`q_{cy} = \sum_i \alpha_i`$ of clients $`c`$.

Choose it when: you reproduce or extend the paper, or the base moves and only class means and spreads may leave a
client. `--preset plus` is its strongest form, for which second moments leave a client, too.

Stored: on the server mean, diagonal spread and count of every class, one covariance matrix where it is shared, and with
linear transport the base that the position started from; on a client nothing between rounds (calibration features
within one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import setting
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.late import LateStatistics, moves_since, record_move
from profcil.engine.phases import Turn
from profcil.errors import ConfigError
from profcil.memory.bank import Bank, Moments, bank_from_moments
from profcil.memory.transport import combine, local_transport
from profcil.methods.base import sent_blocks
from profcil.methods.parts.addends import PlainSum, WeightedShifts
from profcil.methods.parts.linear_transport import (
    aligned_linearly,
    base_has_moved,
    carried_bank,
    carry_memory,
    drift_block,
)
from profcil.methods.parts.memory_blocks import bank_of, block_of
from profcil.methods.parts.pro_settings import ProParams
from profcil.methods.parts.shift_blocks import (
    scaled_shifts,
    with_all_rows,
    with_known_shifts,
    without_shifts,
)
from profcil.methods.pro import Banks, Pro
from profcil.model.net import Tail, Weights
from profcil.randomness import torch_generator

Shifts = dict[str, tuple[Tensor, Tensor]]  # by bank: a shift and a confidence for every class


@dataclass(frozen=True)
class ProMaxParams(ProParams):
    """Settings of PRO-MAX: those of PRO, and those of the transport."""

    transport: str = setting(
        "local",
        "whose drift moves the server's memory: that of the clients' own models, that of the aggregated model, or "
        "(beyond the paper) that of the aggregated model over a whole position, by one linear map",
        choices=("local", "global", "linear"),
    )
    calibration: int = setting(128, "current examples by which a client measures drift", low=1)
    neighbours: int = setting(5, "K: calibration features whose drift moves an old mean", low=1)
    bandwidth: float = setting(
        1.0, "τ as a multiple of the median distance from means to calibration features", low=1e-6
    )
    tau: float = setting(0.0, "τ as a number; 0 = by the median rule", low=0.0)
    ridge: float = setting(0.01, "regularisation of the linear map, as a share of its diagonal", low=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        adapted = self.adapted_bank or self.old_memory == "adapted"
        if self.transport == "linear" and adapted:
            raise ConfigError(
                'transport = "linear" moves base features, not adapted ones; set adapted_bank = false and old_memory = '
                '"base", or transport = "global"'
            )


class ProMax(Pro):
    """PRO-MAX."""

    Params = ProMaxParams
    params: ProMaxParams
    kinds = Pro.kinds | {"transport"}
    additive = Pro.additive | {
        "memory_transport": WeightedShifts(),
        "adapted_transport": WeightedShifts(),
        "drift": PlainSum(),
    }

    @property
    def stores_starting_base(self) -> bool:
        """Whether the server stores the base that a position starts from: for `keep_scores` or linear transport."""
        return super().stores_starting_base or self.params.transport == "linear"

    def exposed(self, unit: str) -> str:
        """Shifts are ratios of sums, and drift sums have no bound on their rows."""
        return f"{type(self).__name__} sends transports, which are no sums over examples; choose pro"

    # -- transport by each client's own drift -------------------------------------------------------------------------

    def align(self, client: Client, inbox: Inbox, weights: Weights, features: Tensor) -> tuple[Banks, dict[str, Block]]:
        """The banks with their means moved by the client's drift, Eq. (local-transport), and the shifts to send."""
        banks, sent = super().align(client, inbox, weights, features)
        if self.params.transport == "linear":
            counted = bool(self.params.keep_scores)
            return aligned_linearly(client, inbox, features, banks, self.params.ridge, counted), sent
        names = self.drifting_banks(client.when)
        drifting = {name: banks[name] for name in names if len(banks[name])}
        if not drifting:
            return banks, sent
        examples = calibration_subset(client, self.params.calibration)
        fitted = {name: Block("model", tensors) for name, tensors in weights.items()}
        before = self.calibration_features(client, inbox, examples)
        before = {name: client.keep(features) for name, features in before.items()}
        after = self.calibration_features(client, fitted, examples)
        shifts = self.shifts_of(drifting, before, after)
        aligned = {}
        for name, (shift, _) in shifts.items():
            aligned[name] = shifted(name, drifting[name], shift)
        if self.params.transport == "local":
            sent |= transport_blocks(drifting, shifts)
        return banks | aligned, sent

    def drifting_banks(self, when: When) -> tuple[str, ...]:
        """The banks whose space moves while a client fits its task: all in plastic rounds; in frozen rounds the adapted
        one, if there is a fitting phase."""
        if self.plastic(when):
            return self.banks
        if "adapted" in self.banks and self.params.fit_when_frozen:
            return ("adapted",)
        return ()

    def calibration_features(self, client: Client, model: Inbox, examples: Tensor) -> dict[str, Tensor]:
        """Features of the calibration subset under a model, in the space of every bank: u = h(x), and z = a(u)."""
        u = client.features(model["base"].tensors, examples)
        spaces = {"memory": u}
        if "adapted" in self.banks:
            tail = Tail(model["adapter"].tensors, {})
            spaces["adapted"] = tail.adapt(u)
        return spaces

    def shifts_of(self, banks: Banks, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Shifts:
        """The shifts of some banks, by the calibration features in the space of each."""
        shifts = {}
        for name, bank in banks.items():
            shifts[name] = self.shift_of(bank.mean, before[name], after[name])
        return shifts

    def shift_of(self, means: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """The shift of every mean and its confidence, by the drift of the calibration features."""
        p = self.params
        return local_transport(means, before, after, neighbours=p.neighbours, factor=p.bandwidth, tau=p.tau)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """PRO's aggregation, then the transport of the memory."""
        return self.apply_transport(super().aggregate(state, replies, when), replies)

    def apply_transport(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Server-side alignment, Eq. (server-transport)."""
        for name in self.banks:
            reports = sent_blocks(replies, f"{name}_transport")
            if reports:
                bank = bank_of(state.blocks[name])
                complete = [b if b.labels == bank.labels else with_all_rows(b, bank.labels) for b in reports]
                shifts = [block.tensors["shift"] for block in complete]
                confidences = [block.tensors["confidence"] for block in complete]
                shift = combine(shifts, confidences)
                if name == "memory":
                    state = record_move(state, {"mean": bank.mean, "shift": shift}, bank.labels)
                bank = shifted(name, bank, shift)
                state = state.put(**{name: block_of(bank)})
        return state

    # -- transport by the drift of the aggregated model: clients store calibration features until it is broadcast ------

    def measures_global_drift(self, when: When) -> bool:
        """Whether the drift of the aggregated model is measured after this round."""
        return self.params.transport == "global" and bool(self.drifting_banks(when))

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        answer = yield from super().turn(client, inbox)
        if not self.measures_global_drift(client.when):
            return answer
        examples = calibration_subset(client, self.params.calibration)
        before = self.calibration_features(client, inbox, examples)
        return replace(answer, private={**before, "measured_at": round_id(client.when)})

    def surveys(self, when: When) -> bool:
        measures_drift = self.measures_global_drift(when) or self.measures_linear_drift(when)
        return super().surveys(when) or measures_drift

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        banks = self.drifting_banks(when) if self.measures_global_drift(when) else ()
        start = ("starting_base",) if self.is_behind(state) else ()
        return (*super().survey_blocks(state, when), *banks, *start)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        sent = self.global_shifts(client, inbox) if self.measures_global_drift(client.when) else {}
        start = inbox.get("starting_base")
        if start:
            before = client.features(start)
            after = client.features(inbox["base"])
            sent["drift"] = drift_block(before, after, client.summed)
        if super().surveys(client.when):
            sent |= super().survey(client, inbox).blocks
        notes = {"extra_bytes": float(start.bytes)} if start else {}
        return Reply(client.id, len(client.current), sent, notes=notes)

    def global_shifts(self, client: Client, inbox: Inbox) -> dict[str, Block]:
        """Shifts by the drift from the broadcast model to the aggregated one; none if the client has no calibration
        features of this round."""
        before = client.private or {}
        measured_at = before.get("measured_at")
        if measured_at is None or not torch.equal(measured_at, round_id(client.when)):
            return {}
        examples = calibration_subset(client, self.params.calibration)
        after = self.calibration_features(client, inbox, examples)
        banks = {}
        for name in self.drifting_banks(client.when):
            bank = bank_of(inbox[name])
            if len(bank):
                banks[name] = bank
        shifts = self.shifts_of(banks, before, after)
        return transport_blocks(banks, shifts)

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Transport of the old memory, then PRO's refresh with statistics under the aggregated model."""
        drifts = sent_blocks(replies, "drift")
        if drifts:
            state = carry_memory(state, drifts, self.params.ridge)
        state = self.apply_transport(state, replies)
        return super().absorb(state, replies, when)

    # -- transport by one linear map, once a position: "starting_base" is stored until the memory has been carried -----

    def measures_linear_drift(self, when: When) -> bool:
        """Whether the base is frozen from the end of this round on, and has moved before."""
        linear = self.params.transport == "linear" and bool(self.banks)
        return linear and self.plastic(when) and self.last_plastic(when)

    def is_behind(self, state: ServerState) -> bool:
        """Whether the base has moved since the memory was measured or carried."""
        return self.params.transport == "linear" and base_has_moved(state)

    # -- replies that arrive late (clock.mode = "buffer") -------------------------------------------------------------

    def late_misfit(self) -> str:
        if self.params.transport == "global":
            return f"{type(self).__name__} with transport = global measures the drift of one round by its clients"
        return super().late_misfit()

    def memory_base(self, state: ServerState) -> str:
        """With linear transport, the starting base until the memory has been carried."""
        return "starting_base" if self.is_behind(state) else "base"

    def rebased(self, reply: Reply, weight: float, when: When) -> Reply:
        """As much of a client's shifts as is used of its update of the base; none where the base is frozen."""
        return scaled_shifts(reply, weight) if "base" in self.moving(when) else without_shifts(reply)

    def add_statistics(
        self, state: ServerState, found: Sequence[LateStatistics], measured: Mapping[int, int], when: When
    ) -> ServerState:
        """With linear transport, the first sums of a position that arrive carry the memory; later ones have none to
        carry."""
        if "starting_base" in state.blocks:
            replies = [late.reply for late in found if late.when.position == when.position]
            drifts = sent_blocks(replies, "drift")
            state = carry_memory(state, drifts, self.params.ridge) if drifts else state
        return super().add_statistics(state, found, measured, when)

    def carried(self, state: ServerState, moments: Moments, version: int) -> Moments:
        """Late statistics after the moves that the memory has made since they were measured."""
        bank = bank_from_moments(moments)
        moves = moves_since(state, version)
        for move in moves:
            bank = self.moved(bank, move)
        return bank.moments() if moves else moments

    def moved(self, bank: Bank, move: Block) -> Bank:
        """A bank after a move of the memory. By a map, all means move. Otherwise a class moves as it did in the memory;
        one that the memory lacked moves like the remembered means near it."""
        if "map" in move.tensors:
            return carried_bank(bank, move.tensors["map"])
        before = move.tensors["mean"]
        if not len(before):
            return bank
        near, _ = self.shift_of(bank.mean, before, before + move.tensors["shift"])
        return bank.shifted(with_known_shifts(near, bank.labels, move))

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """PRO's end of a position; with linear transport the base that the next one starts from is stored."""
        state = super().end_position(state, when)
        memory = state.get("memory")
        if self.params.transport == "linear" and memory and memory.labels:
            state = state.also(starting_base="base")
        return state


def calibration_subset(client: Client, size: int) -> Tensor:
    """A random subset of the current examples, the same in every round of a position."""
    rng = torch_generator(client.seed, "calibration", client.id, client.when.position)
    order = torch.randperm(len(client.current), generator=rng)
    chosen = client.tensor(order[:size])
    return client.current[chosen]


def round_id(when: When) -> Tensor:
    """Position and round, to recognise calibration features of this round."""
    return torch.tensor([when.position, when.round])


def shifted(name: str, bank: Bank, shift: Tensor) -> Bank:
    """The bank after transport: μ^u ← μ^u + Δ. In adapted space the direction of μ^z + Δ is taken, and the length of
    μ^z stays as refresh measured it."""
    moved = bank.shifted(shift)
    if name != "adapted":
        return moved
    length = bank.mean.norm(dim=1, keepdim=True)
    direction = F.normalize(moved.mean, dim=1)
    return replace(moved, mean=direction * length)


def transport_blocks(banks: Banks, shifts: Shifts) -> dict[str, Block]:
    """The blocks to send: a shift and a confidence for every class of every bank."""
    blocks = {}
    for name, (shift, confidence) in shifts.items():
        tensors = {"shift": shift, "confidence": confidence}
        blocks[f"{name}_transport"] = Block("transport", tensors, banks[name].labels)
    return blocks


METHOD = ProMax
