"""PRO outside of rounds: how it predicts, what a saved model holds, and what the diagnostics see of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.engine.client import Client
from profcil.memory import covariance, linear
from profcil.memory.rehearsal import pseudo_features
from profcil.methods.base import Method, Samples
from profcil.methods.parts import solved_head
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
        head = state.get(solved_head.NAME) or self.solve_head(state)
        return solved_head.scores_of(head, features, net.classes)

    def solve_head(self, state: ServerState) -> Block:
        """The linear discriminant head, a row for each remembered class."""
        memory = state.blocks["memory"]
        mean = memory.tensors["mean"].double()
        if not memory.labels:
            return solved_head.solved_head((), mean, mean[:, 0])
        matrix = covariance_of(state.blocks["covariance"]).matrix
        shrunk = covariance.shrunk(matrix, self.params.shrink)
        weight, bias = linear.discriminants(mean, shrunk)
        return solved_head.solved_head(memory.labels, weight, bias)

    def deployed(self, state: ServerState) -> ServerState:
        """The model, or the solved head in place of the memory."""
        if not self.params.closed_head:
            return state.only(*MODEL)
        head = self.solve_head(state)
        mean = state.blocks["memory"].tensors["mean"]
        return solved_head.deploy_head(state, head, mean)

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
        features = pseudo_features(mean, spread, count, self.params.noise, rng, factor)
        return Samples(space, (features,))
