"""The rounds of PRO-LIN: clients train the base against the position's head, and the server averages it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.engine.channel import Inbox, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Shuffled, Train, Turn
from profcil.methods.base import reply
from profcil.methods.parts.inertia import count_examples, interpolate_base
from profcil.methods.parts.kept_scores import dense
from profcil.methods.parts.prolin_memory import ProLinMemory
from profcil.model.losses import cross_entropy, soft_cross_entropy
from profcil.model.net import Net


class ProLinBase(ProLinMemory):
    """The part of PRO-LIN that moves the base."""

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """Adds a second base for kept scores: the position's starting base."""
        if self.params.keep_scores and self.params.base_rounds:
            net.attach("starting_base", copy.deepcopy(net.base))

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
        solved = {name: dense(tensor, head.labels, client) for name, tensor in head.tensors.items()}
        return replace(phase, inputs=client.examples.inputs, constants=masks | solved)

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

    # -- the server: rounds --------------------------------------------------------------------------------------------

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
