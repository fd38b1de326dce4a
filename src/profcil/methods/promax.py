"""PRO-MAX: PRO, with old memories moved along as the representation drifts.

A client remembers base features of a small calibration subset before it fits its current task and looks at them again
afterwards. Each old mean is moved by the drift of the calibration features nearest to it, weighted by closeness; the
client rehearses from the moved means, sends the moves with its confidence in each, and the server applies their
confidence-weighted mean. Frozen rounds have exactly zero drift in base space: nothing is computed or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import setting
from profcil.encoders.model import Tail, Weights
from profcil.engine.client import Client
from profcil.engine.door import When
from profcil.engine.payload import Block, Inbox, Reply, ServerState
from profcil.memory.bank import Bank
from profcil.memory.transport import combine, local_transport
from profcil.methods.pro import Banks, Pro, ProParams, bank_of, block_of
from profcil.randomness import torch_generator


@dataclass(frozen=True)
class ProMaxParams(ProParams):
    """Settings of PRO-MAX: PRO's, and those of the transport."""

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
        if not any(map(len, banks.values())) or not self.plastic(client.when):
            return banks, {}
        index = calibration_subset(client, self.params.calibration)
        before = client.keep(client.features(inbox["base"], index))
        after = client.features(weights["base"], index)
        spaces = {"memory": (before, after)}
        if "adapted" in banks:  # the same construction in adapted space, z = a(u)
            z_before = client.keep(Tail(inbox["adapter"].tensors, {}).adapt(before))
            spaces["adapted"] = (z_before, Tail(weights["adapter"], {}).adapt(after))
        moves = {name: self.transport(bank.mean, *spaces[name]) for name, bank in banks.items()}
        sent = {f"{name}_transport": block_of_transport(banks[name], *moves[name]) for name in banks}
        return {name: moved(name, bank, moves[name][0]) for name, bank in banks.items()}, sent

    def transport(self, means: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        p = self.params
        return local_transport(means, before, after, neighbours=p.neighbours, factor=p.bandwidth, tau=p.tau)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        state = super().aggregate(state, replies, when)
        for name in self.banks:
            moves = [r.blocks[f"{name}_transport"].tensors for r in replies if f"{name}_transport" in r.blocks]
            if moves:
                shift = combine([m["shift"] for m in moves], [m["confidence"] for m in moves])
                state = state.put(**{name: block_of(moved(name, bank_of(state.blocks[name]), shift))})
        return state


def calibration_subset(client: Client, size: int) -> Tensor:
    """A random part of the current examples, the same in every round of a position."""
    rng = torch_generator(client.seed, "calibration", client.id, client.when.position)
    return client.current[torch.randperm(len(client.current), generator=rng)[:size].to(client.current.device)]


def moved(name: str, bank: Bank, shift: Tensor) -> Bank:
    """μ^u ← μ^u + Δ. In adapted space μ^z ← norm(μ^z + Δ): the direction follows the drift, the length stays what
    refresh measured."""
    bank, length = bank.moved(shift), bank.mean.norm(dim=1, keepdim=True)
    return replace(bank, mean=F.normalize(bank.mean, dim=1) * length) if name == "adapted" else bank


def block_of_transport(bank: Bank, shift: Tensor, confidence: Tensor) -> Block:
    return Block("transport", {"shift": shift, "confidence": confidence}, bank.labels)


METHOD = ProMax
