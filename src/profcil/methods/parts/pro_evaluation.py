"""PRO outside of rounds: how it predicts, what a saved model holds, and what the diagnostics see of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.engine.client import Client
from profcil.memory import covariance, linear
from profcil.memory.rehearsal import pseudo_features
from profcil.memory.uncertainty import shrunk_discriminants
from profcil.methods.base import Method, Samples
from profcil.methods.parts import mean_uncertainty, solved_head
from profcil.methods.parts.memory_blocks import bank_of
from profcil.methods.parts.pro_settings import ProParams
from profcil.methods.parts.shared_covariance import covariance_of, factor_of
from profcil.model.net import MODEL, Net


class ProEvaluation(Method):
    """The part of PRO that no round uses."""

    params: ProParams

    # -- prediction ---------------------------------------------------------------------------------------------------

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Scores of adapter and head, or of the closed head. With the latter a class without memory never wins over one
        that has it."""
        if not self.params.closed_head:
            return super().scores(net, state, features)
        head = state.get(solved_head.NAME) or self.solve_head(state)[0]
        return solved_head.scores_of(head, features, net.classes)

    def solve_head(self, state: ServerState) -> tuple[Block, Tensor]:
        """The linear discriminant head, a row for each remembered class, and the means that it was solved from."""
        memory = state.blocks["memory"]
        mean = memory.tensors["mean"].double()
        if not memory.labels:
            return solved_head.solved_head((), mean, mean[:, 0]), mean
        shared = covariance_of(state.blocks["covariance"])
        penalised = covariance.shrunk(shared.matrix, self.params.shrink)
        if self.params.uncertainty == "shrink":
            variance = mean_uncertainty.variance_of(memory, mean_uncertainty.sums_of(state))
            head = shrunk_discriminants(mean, variance, shared.count, shared.matrix, penalised)
            return mean_uncertainty.head_block(memory.labels, head), head.mean
        weight, bias = linear.discriminants(mean, penalised)
        return solved_head.solved_head(memory.labels, weight, bias), memory.tensors["mean"]

    def deployed(self, state: ServerState) -> ServerState:
        """The model, or the solved head in place of the memory."""
        if not self.params.closed_head:
            return state.only(*MODEL)
        head, mean = self.solve_head(state)
        return solved_head.deploy_head(state, head, mean, "base")

    def temperature(self, state: ServerState) -> float | None:
        return solved_head.stored_temperature(state) if self.params.closed_head else 1.0

    # -- diagnostics --------------------------------------------------------------------------------------------------

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        spaces = {"memory": lambda u: u, "adapted": net.tail.adapt}
        return {name: (state.blocks[name], spaces[name]) for name in spaces if name in state.blocks}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        space = "adapted" if self.params.old_memory == "adapted" else "base"
        bank = state.get("adapted" if space == "adapted" else "memory")
        if bank is None or label not in bank.labels:
            return None
        row = [bank.labels.index(label)]
        mean = bank.tensors["mean"][row]
        spread = bank.tensors["spread"][row]
        shared = state.get("covariance")
        factor = factor_of(shared) if shared else None
        noise = self.params.noise
        if space == "base" and mean_uncertainty.NAME in state.blocks:
            sums = mean_uncertainty.sums_of(state)
            spread = mean_uncertainty.predictive(bank_of(bank), sums, noise, shared is not None).spread[row]
            noise = 1.0
            if factor is not None:
                factor = factor * spread[0, 0]
        features = pseudo_features(mean, spread, count, noise, rng, factor)
        return Samples(space, (features,))
