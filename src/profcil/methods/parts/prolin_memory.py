"""What PRO-LIN computes with at any time: the features z, the memory as blocks, and the head that is solved from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, ServerState
from profcil.engine.client import BlockFeatures, Client, FeatureMap
from profcil.memory import linear, sketch, symmetric
from profcil.memory.linear import Summary
from profcil.memory.uncertainty import ShrunkHead, fresh_dispersion, mean_variance, shrunk_discriminants
from profcil.methods.base import Method
from profcil.methods.parts import mean_uncertainty, solved_head
from profcil.methods.parts.prolin_settings import ProLinParams
from profcil.methods.parts.summaries import empty_summary, put_summary, stored_summary
from profcil.model.dictionary import Dictionary, make_dictionary
from profcil.model.net import MODEL, Net, Weights


class ProLinMemory(Method):
    """The part of PRO-LIN that does not depend on rounds."""

    params: ProLinParams

    # -- features -----------------------------------------------------------------------------------------------------

    def dictionary(self, net: Net, like: Inputs) -> Dictionary | None:
        p = self.params
        if not p.dictionary:
            return None
        return make_dictionary(net.facts, like, net.vocabulary, p.dictionary, p.min_support, p.text_entries)

    def joint_features(self, blocks: Mapping[str, Block], under: Callable[[FeatureMap], Tensor]) -> Tensor:
        """z of some examples. `under` computes their features under a base, or by any function of their inputs."""
        bases = ("base", "anchor") if self.has_base else ()
        z = [under(blocks[name]) for name in bases if name in blocks]
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

    def limited(self, client: Client, z: Tensor) -> Tensor:
        """z as it may be summed with noise. Only features that nothing is trained on can be normalised."""
        return client.bounded(z) if self.params.base_rounds else client.normalised(z)

    @property
    def has_base(self) -> bool:
        """Whether z has features of a base. A base that never moves is the warmed-up one: the anchor."""
        return self.params.anchor or self.params.base_rounds != 0

    @property
    def feature_blocks(self) -> tuple[str, ...]:
        """The blocks that z is computed from, where there are such."""
        return ("base", "anchor", "dictionary") if self.has_base else ("dictionary",)

    @property
    def anchored(self) -> bool:
        """Whether z has the features of the warmed-up base beside those of the moving one."""
        return self.params.anchor and self.params.base_rounds != 0

    # -- memory -------------------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        state = super().begin({b: weights[b] for b in MODEL})
        if self.anchored:
            state = state.put(anchor=Block("memory", weights["base"]))
        if "dictionary" in weights:
            state = state.put(dictionary=Block("memory", weights["dictionary"]))
        scale = weights["adapter"]["scale"]
        bases = self.has_base + self.anchored
        width = bases * len(scale) + self.params.dictionary
        features = scale.new_zeros(0, width)
        labels = scale.new_zeros(0).long()
        if self.uncertain:
            state = state.put(**{mean_uncertainty.NAME: mean_uncertainty.empty_block(scale)})
        return self.put_memory(state, self.with_dispersion(empty_summary(features, labels, self.params.rank)))

    @property
    def uncertain(self) -> bool:
        """Whether the uncertainty of class means is stored and used."""
        return self.params.uncertainty == "shrink"

    def with_dispersion(self, s: Summary) -> Summary:
        """The summary of one client, with the dispersion of its rows where it is stored."""
        return replace(s, dispersion=fresh_dispersion(s.count)) if self.uncertain else s

    def width(self, state: ServerState) -> int:
        """The number of all features z."""
        return state.blocks["bank"].tensors["mean"].shape[1]

    def moving_width(self, state: ServerState) -> int:
        """The number of features of the base, which come first."""
        return len(state.blocks["adapter"].tensors["scale"]) if self.has_base else 0

    def put_memory(self, state: ServerState, memory: Summary) -> ServerState:
        """Stores the memory, and its labels alone for opening reports."""
        state = put_summary(state, "bank", memory)
        return state.put(known_classes=Block("memory", {}, memory.labels))

    def memory(self, state: ServerState) -> Summary:
        """The stored memory."""
        memory = stored_summary(state, "bank")
        assert memory is not None
        return memory

    # -- prediction and diagnostics -----------------------------------------------------------------------------------

    def views(self, state: ServerState, under: Callable[[FeatureMap], Tensor]) -> Tensor:
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
            lda = linear.lda if self.params.moments == "full" else sketch.lda
            weight, bias = lda(memory, self.params.shrink_deployed, self.params.dictionary)
        normalises = not self.params.base_rounds
        return solved_head.solved_head(memory.labels, weight, bias, memory.bound, normalises), memory.mean

    def solve_shrunk(self, memory: Summary, sums: Tensor) -> ShrunkHead:
        """The deployed head from means whose uncertainty is known."""
        assert memory.dispersion is not None
        p = self.params
        covariance, penalty = linear.covariance_and_penalty(memory, p.shrink_deployed, p.dictionary)
        variance = mean_variance(memory.count, memory.dispersion, sums)
        penalised = symmetric.add_to_diagonal(covariance, penalty)
        return shrunk_discriminants(memory.mean, variance, float(memory.count.sum()), covariance, penalised)

    def deployed(self, state: ServerState) -> ServerState:
        """The solved head in place of the memory, which is larger and reveals more."""
        head, mean = self.solve(state)
        return solved_head.deploy_head(state, head, mean, *self.feature_blocks)

    def temperature(self, state: ServerState) -> float | None:
        return solved_head.stored_temperature(state)

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        """The means of the base's features; those of the fixed ones are exact. A dictionary alone has only such."""
        bank = state.blocks["bank"]
        d = net.features if self.has_base else self.width(state)
        mean = bank.tensors["mean"][:, :d]
        moving = Block("memory", {**bank.tensors, "mean": mean}, bank.labels)
        return {"memory": (moving, lambda z: z[:, :d])}
