"""PRO-MAX: PRO, with transport of old memories as the representation drifts.

A client computes base features of a small calibration subset before it fits its current task, and again afterwards.
Each old mean moves by the drift of the calibration features nearest to it, weighted by closeness. The client rehearses
from the moved means and sends the shifts with a confidence for each. The server applies their confidence-weighted mean.
In frozen rounds the drift in base space is exactly zero: nothing is computed or sent. In adapted space (`adapted_bank`)
the memory also follows the fitting phase of frozen rounds, if there is one.

The drift of one client is not the drift of the averaged model. With `transport = "global"` the client still rehearses
from means moved by its own drift, but the server applies shifts measured after aggregation: the drift of the same
calibration examples from the broadcast base to the aggregated one.

Stored: on the server mean, diagonal spread and count of every class, and one covariance matrix where it is shared; on a
client nothing between rounds (calibration features within one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import setting
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState
from profcil.engine.phases import Turn
from profcil.memory.bank import Bank
from profcil.memory.transport import combine, local_transport
from profcil.methods.parts.memory_blocks import bank_of, block_of
from profcil.methods.parts.pro_settings import ProParams
from profcil.methods.pro import Banks, Pro
from profcil.model.net import Tail, Weights
from profcil.randomness import torch_generator

Shifts = dict[str, tuple[Tensor, Tensor]]  # by bank: a shift and a confidence for every class


@dataclass(frozen=True)
class ProMaxParams(ProParams):
    """Settings of PRO-MAX: those of PRO, and those of the transport."""

    transport: str = setting(
        "local",
        "whose drift moves the server's memory: that of the clients' own models, or of the aggregated model",
        choices=("local", "global"),
    )
    calibration: int = setting(128, "current examples by which a client measures drift", low=1)
    neighbours: int = setting(5, "K: calibration features whose drift moves an old mean", low=1)
    bandwidth: float = setting(
        1.0, "τ as a multiple of the median distance from means to calibration features", low=1e-6
    )
    tau: float = setting(0.0, "τ as a number; 0 = by the median rule", low=0.0)


class ProMax(Pro):
    """PRO-MAX."""

    Params = ProMaxParams
    params: ProMaxParams
    kinds = Pro.kinds | {"transport"}

    # -- transport by each client's own drift -------------------------------------------------------------------------

    def align(self, client: Client, inbox: Inbox, weights: Weights) -> tuple[Banks, dict[str, Block]]:
        """The banks with their means moved by the client's drift, Eq. (local-transport), and the shifts to send."""
        banks, sent = super().align(client, inbox, weights)
        drifting = {name: banks[name] for name in self.drifting_banks(client.when) if len(banks[name])}
        if not drifting:
            return banks, sent
        examples = calibration_subset(client, self.params.calibration)
        fitted = {name: Block("model", tensors) for name, tensors in weights.items()}
        before = self.calibration_features(client, inbox, examples)
        before = {name: client.keep(features) for name, features in before.items()}
        after = self.calibration_features(client, fitted, examples)
        shifts = {name: self.shift_of(bank.mean, before[name], after[name]) for name, bank in drifting.items()}
        aligned = {name: shifted(name, bank, shifts[name][0]) for name, bank in drifting.items()}
        if self.params.transport == "local":
            sent |= transport_blocks(drifting, shifts)
        return banks | aligned, sent

    def drifting_banks(self, when: When) -> tuple[str, ...]:
        """The banks whose space moves while a client fits its task: all in plastic rounds; in frozen rounds the adapted
        one, if there is a fitting phase."""
        if self.plastic(when):
            return self.banks
        return tuple(name for name in self.banks if name == "adapted" and self.params.fit_when_frozen)

    def calibration_features(self, client: Client, model: Inbox, examples: Tensor) -> dict[str, Tensor]:
        """Features of the calibration subset under a model, in the space of every bank: u = h(x), and z = a(u)."""
        u = client.features(model["base"].tensors, examples)
        spaces = {"memory": u}
        if "adapted" in self.banks:
            spaces["adapted"] = Tail(model["adapter"].tensors, {}).adapt(u)
        return spaces

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
            reports = [r.blocks[f"{name}_transport"].tensors for r in replies if f"{name}_transport" in r.blocks]
            if reports:
                shift = combine([t["shift"] for t in reports], [t["confidence"] for t in reports])
                bank = shifted(name, bank_of(state.blocks[name]), shift)
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
        before = self.calibration_features(client, inbox, calibration_subset(client, self.params.calibration))
        return replace(answer, private={**before, "measured_at": round_id(client.when)})

    def surveys(self, when: When) -> bool:
        return super().surveys(when) or self.measures_global_drift(when)

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        banks = self.drifting_banks(when) if self.measures_global_drift(when) else ()
        return (*super().survey_blocks(state, when), *banks)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        sent = self.global_shifts(client, inbox) if self.measures_global_drift(client.when) else {}
        if super().surveys(client.when):
            sent |= super().survey(client, inbox).blocks
        return Reply(client.id, len(client.current), sent)

    def global_shifts(self, client: Client, inbox: Inbox) -> dict[str, Block]:
        """Shifts by the drift from the broadcast model to the aggregated one; none if the client has no calibration
        features of this round."""
        before = client.private or {}
        if "measured_at" not in before or not torch.equal(before["measured_at"], round_id(client.when)):
            return {}
        after = self.calibration_features(client, inbox, calibration_subset(client, self.params.calibration))
        banks = {name: bank_of(inbox[name]) for name in self.drifting_banks(client.when)}
        banks = {name: bank for name, bank in banks.items() if len(bank)}
        shifts = {name: self.shift_of(bank.mean, before[name], after[name]) for name, bank in banks.items()}
        return transport_blocks(banks, shifts)

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Transport of the old memory, then PRO's refresh with statistics under the aggregated model."""
        return super().absorb(self.apply_transport(state, replies), replies, when)


def calibration_subset(client: Client, size: int) -> Tensor:
    """A random subset of the current examples, the same in every round of a position."""
    rng = torch_generator(client.seed, "calibration", client.id, client.when.position)
    chosen = torch.randperm(len(client.current), generator=rng)[:size]
    return client.current[client.tensor(chosen)]


def shifted(name: str, bank: Bank, shift: Tensor) -> Bank:
    """The bank after transport: μ^u ← μ^u + Δ. In adapted space the direction of μ^z + Δ is taken, and the length of
    μ^z stays as refresh measured it."""
    moved = bank.shifted(shift)
    if name != "adapted":
        return moved
    length = bank.mean.norm(dim=1, keepdim=True)
    return replace(moved, mean=F.normalize(moved.mean, dim=1) * length)


def round_id(when: When) -> Tensor:
    """Position and round, to recognise calibration features of this round."""
    return torch.tensor([when.position, when.round])


def transport_blocks(banks: Banks, shifts: Shifts) -> dict[str, Block]:
    """The blocks to send: a shift and a confidence for every class of every bank."""
    blocks = {}
    for name, (shift, confidence) in shifts.items():
        tensors = {"shift": shift, "confidence": confidence}
        blocks[f"{name}_transport"] = Block("transport", tensors, banks[name].labels)
    return blocks


METHOD = ProMax
