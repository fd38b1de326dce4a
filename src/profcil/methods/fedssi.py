"""FedSSI (Li et al., ICML 2025): synaptic intelligence on every client, measured along a personalised surrogate.

Kept: no rehearsal and nothing sent beyond the model. Each client trains a surrogate v on its data, tied to the global
model by the rule v ← v − η(∇ℓ + q(v − w^g)) with q = (1 − λ)/2λ; what each parameter contributes along that path is
its importance, and later local training pays c·Σ Ω_i (w_i − w*_i)² for leaving the reference w*.

Stored: on the server nothing; on a client importance, pending importance and a reference model, three models in size.

Adapted to client-specific orders: a client's clock is its own participation. At its first turn in a position it makes
two steps. It settles the position it took part in before: Ω grows by that importance, and w* becomes the model just
broadcast, which is the first global model the client sees after that boundary (later than the boundary itself if it
was idle in between). Then the surrogate walks on the current data; its importance is put aside until the next
settling, so that a position never resists its own learning. Contributions use real parameter differences, so the
walk may use the run's own optimiser, and the gradient of the data loss alone. BatchNorm's statistics have no
importance; head rows outside the loss's label space have none either, as their gradient is exactly zero.

A client keeps Ω, w* and the pending importance in float32, three models; they are metered as client memory. The walk
runs inside the turn, not as an engine phase, because it needs the gradient of every step. There is no replay and no
class-level summary, so a budget regime has nothing to expand.

Left out: nothing that we know of.

Uncertain: there is no public code and we had no text of the paper's body. The surrogate's rule is that of the same
authors' Re-Fed, the penalty and its defaults c = 0.5, ξ = 1 are those of common SI implementations, and one epoch
and λ = 0.5 are our choice. The source paper lists class-level summaries for FedSSI; a client-only method sends none.
With one head over all seen classes expect FedAvg's forgetting: old rows of the head are pushed down by data that
lacks their classes, whatever the penalty; `label_space = "local"` takes that push away. On digits (validation seeds)
that masking alone accounts for the gain, and the default penalty is too weak to be noticed: squared steps of the walk
are at most 2e-5, far below ξ = 1. ξ = 0.001 with c from 50 to 1000 trades learning for keeping (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.config import setting
from profcil.engine.client import Client
from profcil.engine.optim import Optimiser, clip_
from profcil.engine.payload import Inbox, weights_of
from profcil.engine.phases import Batch, Turn, cut
from profcil.methods.base import Method, Params, reply
from profcil.methods.parts.importance import importance, penalty, walk
from profcil.model.net import MODEL, Net, Tensors, Weights


@dataclass(frozen=True)
class FedSSIParams(Params):
    """Settings of FedSSI."""

    c: float = setting(0.5, "strength of the penalty for moving important parameters", low=0.0)
    xi: float = setting(1.0, "ξ: damping where a parameter has hardly moved", low=1e-8)
    mix: float = setting(
        0.5, "λ of the surrogate: 1 = local data only, towards 0 = the global model", low=1e-3, high=1.0
    )
    walk_epochs: int = setting(1, "epochs of the surrogate, once a position", low=1)


class FedSSI(Method):
    """FedSSI."""

    Params = FedSSIParams

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        weights, allowed = weights_of(inbox), client.allowed(self.label_space(client, inbox))
        own = self.private(client, weights, allowed)
        held = {k: client.keep(t) for k, t in own.items() if k.startswith(("omega/", "reference/"))}
        loss = self.kept_loss if held else self.fit_loss  # in its first position a client has nothing to keep
        fit = client.train("fit", weights, MODEL, loss)
        done = yield replace(fit, constants={"allowed": allowed, **held})
        return replace(reply(client, done.weights, MODEL, loss=done.loss), private=own)

    def kept_loss(self, net: Net, batch: Batch) -> Tensor:
        parameters = parameters_of(net)
        omega, reference = ({k: batch[f"{what}/{k}"] for k in parameters} for what in ("omega", "reference"))
        return self.fit_loss(net, batch) + self.params.c * penalty(parameters, omega, reference)

    def private(self, client: Client, weights: Weights, allowed: Tensor) -> Tensors:
        """The client's own state for this turn; renewed at its first turn in a position."""
        own, position = dict(client.private or {}), client.when.position
        if "position" not in own or int(own["position"]) != position:
            own = settled(own, weights)
            walked = self.surrogate(client, weights, allowed)
            own |= {f"pending/{k}": t for k, t in walked.items()}
            own["position"] = torch.tensor(position)
        for key, tensor in own.items():
            if key.startswith("pending/"):
                client.keep(tensor)
        return own

    def surrogate(self, client: Client, weights: Weights, allowed: Tensor) -> Tensors:
        """The importance of every parameter for the current data, along the surrogate's path from the global model."""
        client.net.load(weights)
        client.net.train()
        parameters = parameters_of(client.net)
        moving = [p.requires_grad_() for p in parameters.values()]
        start = [p.detach().clone() for p in moving]
        optimiser, q = Optimiser(client.settings, moving), (1 - self.params.mix) / (2 * self.params.mix)

        def step(grads: list[Tensor]) -> None:
            torch._foreach_add_(grads, torch._foreach_sub([p.detach() for p in moving], start), alpha=q)
            clip_(grads, client.settings.clip)
            optimiser.step(grads)

        path = walk(moving, self.losses(client, allowed), step)
        found = importance(path, start, [p.detach() for p in moving], self.params.xi)
        return dict(zip(parameters, found, strict=True))

    def losses(self, client: Client, allowed: Tensor) -> Iterator[Tensor]:
        """The data loss on one batch after another, under whatever weights the net holds by then."""
        rng = torch.Generator(device=client.y.device).manual_seed(client.number("surrogate"))
        for _ in range(self.params.walk_epochs):
            for rows in cut(len(client.current), client.settings.batch, rng):
                inputs = client.examples.inputs(client.current[rows])
                yield self.fit_loss(client.net, {"inputs": inputs, "y": client.y[rows], "allowed": allowed, "rng": rng})


def settled(own: Tensors, weights: Weights) -> Tensors:
    """Ω with the pending importance added, and the broadcast model as its reference; nothing before the first walk."""
    settled: Tensors = {}
    for key in [k.removeprefix("pending/") for k in own if k.startswith("pending/")]:
        block, name = key.split(".", 1)
        fresh, before = own[f"pending/{key}"], own.get(f"omega/{key}")
        settled[f"omega/{key}"] = fresh if before is None else before + fresh
        settled[f"reference/{key}"] = weights[block][name]
    return settled


def parameters_of(net: Net) -> Tensors:
    """The model's parameters by block and name, without buffers."""
    return {f"{b}.{k}": p for b in MODEL for k, p in getattr(net, b).named_parameters()}


METHOD = FedSSI
