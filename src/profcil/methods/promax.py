"""PRO-MAX: PRO, with old memories moved along as the representation drifts.

A client remembers base features of a small calibration subset before it fits its current task and looks at them again
afterwards. Each old mean is moved by the drift of the calibration features nearest to it, weighted by closeness; the
client rehearses from the moved means, sends the moves with its confidence in each, and the server applies their
confidence-weighted mean. Frozen rounds have exactly zero drift in base space: nothing is computed or sent. In adapted
space (`adapted_bank`) the memory also follows the fitting phase of frozen rounds, where there is one.

A client's own drift is not the averaged model's. With `transport = "global"` the client still rehearses from means
moved by its own drift, but what the server applies is measured again after aggregation: the drift of the same
calibration examples from the broadcast base to the aggregated one.

Stored: on the server mean, diagonal spread and count of every class; on a client nothing between rounds (calibration
features within one).
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
from profcil.methods.pro import Banks, Pro, ProParams, bank_of, block_of
from profcil.model.net import Tail, Weights
from profcil.randomness import torch_generator


@dataclass(frozen=True)
class ProMaxParams(ProParams):
    """Settings of PRO-MAX: PRO's, and those of the transport."""

    transport: str = setting(
        "local",
        "whose drift moves the server's memory: the clients' own, or the aggregated model's",
        choices=("local", "global"),
    )
    calibration: int = setting(128, "current examples whose drift a client watches", low=1)
    neighbours: int = setting(5, "K: calibration features that speak for an old mean", low=1)
    bandwidth: float = setting(
        1.0, "τ as a multiple of the median distance from means to calibration features", low=1e-6
    )
    tau: float = setting(0.0, "τ as a number; 0 = by the median rule", low=0.0)


class ProMax(Pro):
    """PRO-MAX."""

    Params = ProMaxParams
    kinds = Pro.kinds | {"transport"}

    def align(self, client: Client, inbox: Inbox, banks: Banks, weights: Weights) -> tuple[Banks, dict[str, Block]]:
        moving = {name: banks[name] for name in self.drifting(client.when) if len(banks[name])}
        if not moving:
            return banks, {}
        index = calibration_subset(client, self.params.calibration)
        before = {name: client.keep(u) for name, u in self.watched(client, inbox, index).items()}
        after = self.watched(client, {b: Block("model", t) for b, t in weights.items()}, index)
        moves = {name: self.move(bank.mean, before[name], after[name]) for name, bank in moving.items()}
        near = {name: moved(name, bank, moves[name][0]) for name, bank in moving.items()}
        return banks | near, blocks_of_moves(moving, moves) if self.params.transport == "local" else {}

    def drifting(self, when: When) -> tuple[str, ...]:
        """The memories whose space moves while a client fits its task: all while the base moves; in frozen rounds the
        adapted one, where there is a fitting phase at all."""
        frozen = ("adapted",) if self.params.fit_when_frozen else ()
        return tuple(name for name in self.banks if self.plastic(when) or name in frozen)

    def watched(self, client: Client, model: Inbox, index: Tensor) -> dict[str, Tensor]:
        """Calibration features under some model, in the space of every bank: u = h(x), and z = a(u)."""
        u = client.features(model["base"].tensors, index)
        spaces = {"memory": u}
        if "adapted" in self.banks:
            spaces["adapted"] = Tail(model["adapter"].tensors, {}).adapt(u)
        return spaces

    def move(self, means: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        p = self.params
        return local_transport(means, before, after, neighbours=p.neighbours, factor=p.bandwidth, tau=p.tau)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        return self.apply(super().aggregate(state, replies, when), replies)

    def apply(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Server-side alignment, Eq. (server-transport)."""
        for name in self.banks:
            moves = [r.blocks[f"{name}_transport"].tensors for r in replies if f"{name}_transport" in r.blocks]
            if moves:
                shift = combine([m["shift"] for m in moves], [m["confidence"] for m in moves])
                state = state.put(**{name: block_of(moved(name, bank_of(state.blocks[name]), shift))})
        return state

    # -- transport under the aggregated model: the calibration features wait on the client until it is there -----------

    def follows(self, when: When) -> bool:
        return self.params.transport == "global" and bool(self.drifting(when))

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        answer = yield from super().turn(client, inbox)
        if not self.follows(client.when):
            return answer
        before = self.watched(client, inbox, calibration_subset(client, self.params.calibration))
        return replace(answer, private={**before, "moment": moment(client.when)})

    def surveys(self, when: When) -> bool:
        return super().surveys(when) or self.follows(when)

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return (*super().survey_blocks(state, when), *(self.drifting(when) if self.follows(when) else ()))

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        own, told = client.private or {}, {}
        if self.follows(client.when) and "moment" in own and torch.equal(own["moment"], moment(client.when)):
            after = self.watched(client, inbox, calibration_subset(client, self.params.calibration))
            banks = {name: bank for name in self.drifting(client.when) if len(bank := bank_of(inbox[name]))}
            moves = {name: self.move(bank.mean, own[name], after[name]) for name, bank in banks.items()}
            told = blocks_of_moves(banks, moves)
        if super().surveys(client.when):
            told |= super().survey(client, inbox).blocks
        return Reply(client.id, len(client.current), told)

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Old memories move first; what was measured under the aggregated model joins them."""
        return super().absorb(self.apply(state, replies), replies, when)


def calibration_subset(client: Client, size: int) -> Tensor:
    """A random part of the current examples, the same in every round of a position."""
    rng = torch_generator(client.seed, "calibration", client.id, client.when.position)
    chosen = torch.randperm(len(client.current), generator=rng)[:size]
    return client.current[client.tensor(chosen)]


def moved(name: str, bank: Bank, shift: Tensor) -> Bank:
    """μ^u ← μ^u + Δ. In adapted space μ^z ← norm(μ^z + Δ): the direction follows the drift, the length stays what
    refresh measured."""
    bank, length = bank.moved(shift), bank.mean.norm(dim=1, keepdim=True)
    return replace(bank, mean=F.normalize(bank.mean, dim=1) * length) if name == "adapted" else bank


def moment(when: When) -> Tensor:
    """Which round some calibration features were taken in."""
    return torch.tensor([when.position, when.round])


def blocks_of_moves(banks: Banks, moves: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Block]:
    """What is sent: a shift and a confidence for every class of every bank."""
    return {
        f"{name}_transport": Block(
            "transport", dict(zip(("shift", "confidence"), move, strict=True)), banks[name].labels
        )
        for name, move in moves.items()
    }


METHOD = ProMax
