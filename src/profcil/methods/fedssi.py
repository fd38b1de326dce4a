r"""FedSSI (Li et al., ICML 2025): synaptic intelligence on every client, measured along a personalised surrogate.

Kept: no rehearsal, and only the model is sent. Each client trains a surrogate v on its data, tied to the global model
by the rule v ← v − η(∇ℓ + q(v − w^g)) with q = (1 − λ)/2λ. The contribution of each parameter along that path is its
importance Ω, and later local training adds the penalty c·Σ Ω_i (w_i − w*_i)² for leaving the reference w*.

Loss: $`\mathcal{L}(w) = \mathrm{CE}_S(f_w(x), y) + c \sum_i \Omega_i (w_i - w^{\star}_i)^2`$, where a surrogate's way
from $`w`$ to $`v`$ adds $`\max(s_i, 0) / ((v_i - w_i)^2 + \xi)`$ to $`\Omega_i`$ for its path integral $`s_i`$.

Choose it when: nothing but the model may be sent and a client can store three models. With its authors' coefficients it
is level with FedAvg here.

Stored: on the server nothing; on a client importance, pending importance and a reference model, three models in size.

Adapted to client-specific orders: a client counts positions by its own participation. Its first turn in a position has
two steps. First, the importance of the previous position it took part in is added to Ω, and w* becomes the model just
broadcast: the first global model that the client receives after that position, later than its end if the client was
idle in between. Second, the surrogate is trained on the current data. Its importance stays pending until the client's
next position, so that a position does not resist its own learning. Contributions use actual parameter differences, so
the surrogate may use the run's optimiser, and the gradient of the data loss alone. BatchNorm's statistics have no
importance. Head rows outside the loss's label space have none either, as their gradient is exactly zero.

A client stores Ω, w* and the pending importance in float32, three models, metered as client memory. The surrogate is
trained inside the turn, not in an engine phase, because it needs the gradient of every step. There is no replay and no
class-level summary, so a budget regime has nothing to expand.

Left out: nothing known.

Uncertain: there is no public code, and we had no text of the paper's body. The surrogate's rule is that of the same
authors' Re-Fed; the penalty and its defaults c = 0.5, ξ = 1 are those of common SI implementations; one epoch and
λ = 0.5 are our choice. The source paper lists class-level summaries for FedSSI; a client-only method sends none. With
one head over all seen classes expect FedAvg's forgetting: data without the old classes lowers the scores of the head's
old rows, whatever the penalty; `label_space = "local"` prevents that. On digits (validation seeds) that masking alone
accounts for the gain, and the default penalty is too weak to have an effect: squared parameter changes of the surrogate
are at most 2e-5, far below ξ = 1. ξ = 0.001 with c from 50 to 1000 trades learning for less forgetting
(docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.config import setting
from profcil.engine.channel import Inbox, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Turn, cut
from profcil.engine.steps import Optimiser, clip_
from profcil.methods.base import Method, Params, reply
from profcil.methods.parts.importance import importance, path_integral, penalty
from profcil.model.net import MODEL, Net, Tensors, Weights


@dataclass(frozen=True)
class FedSSIParams(Params):
    """Settings of FedSSI."""

    c: float = setting(0.5, "strength of the penalty for moving important parameters", low=0.0)
    xi: float = setting(1.0, "ξ: damping for parameters that have hardly moved", low=1e-8)
    mix: float = setting(
        0.5, "λ of the surrogate: 1 = local data only, towards 0 = the global model", low=1e-3, high=1.0
    )
    walk_epochs: int = setting(1, "epochs of the surrogate, once per position", low=1)


class FedSSI(Method):
    """FedSSI."""

    Params = FedSSIParams
    params: FedSSIParams

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        weights = weights_of(inbox)
        allowed = client.allowed(self.label_space(client, inbox))
        private = self.private_state(client, weights, allowed)
        anchored = {}
        for name, tensor in private.items():
            if name.startswith(("omega/", "reference/")):
                anchored[name] = client.keep(tensor)
        loss = self.penalised_loss if anchored else self.fit_loss  # there is no Ω in a client's first position
        fit = client.train("fit", weights, MODEL, loss)
        done = yield replace(fit, constants={"allowed": allowed, **anchored})
        answer = reply(client, done.weights, MODEL, loss=done.loss)
        return replace(answer, private=private)

    def penalised_loss(self, net: Net, batch: Batch) -> Tensor:
        """The data loss plus c·Σ Ω_i (w_i − w*_i)²."""
        parameters = parameters_of(net)
        omega = {k: batch[f"omega/{k}"] for k in parameters}
        reference = {k: batch[f"reference/{k}"] for k in parameters}
        return self.fit_loss(net, batch) + self.params.c * penalty(parameters, omega, reference)

    def private_state(self, client: Client, weights: Weights, allowed: Tensor) -> Tensors:
        """The client's private tensors for this turn; renewed at its first turn in a position."""
        private = dict(client.private or {})
        position = client.when.position
        if "position" not in private or int(private["position"]) != position:
            private = add_pending_importance(private, weights)
            pending = self.surrogate_importance(client, weights, allowed)
            private |= {f"pending/{k}": t for k, t in pending.items()}
            private["position"] = torch.tensor(position)
        for key, tensor in private.items():
            if key.startswith("pending/"):
                client.keep(tensor)
        return private

    def surrogate_importance(self, client: Client, weights: Weights, allowed: Tensor) -> Tensors:
        """The importance of every parameter for the current data, along the surrogate's path from the global model."""
        client.net.load(weights)
        client.net.train()
        parameters = parameters_of(client.net)
        surrogate = [p.requires_grad_() for p in parameters.values()]
        start = [p.detach().clone() for p in surrogate]
        optimiser = Optimiser(client.settings, surrogate)
        q = (1 - self.params.mix) / (2 * self.params.mix)

        def step(grads: list[Tensor]) -> None:
            moved = torch._foreach_sub([p.detach() for p in surrogate], start)
            torch._foreach_add_(grads, moved, alpha=q)
            clip_(grads, client.settings.clip)
            optimiser.step(grads)

        path = path_integral(surrogate, self.data_losses(client, allowed), step)
        end = [p.detach() for p in surrogate]
        by_parameter = importance(path, start, end, self.params.xi)
        return dict(zip(parameters, by_parameter, strict=True))

    def data_losses(self, client: Client, allowed: Tensor) -> Iterator[Tensor]:
        """The data loss of one batch after another, each under the weights that the net has at that step."""
        rng = torch.Generator(device=client.y.device).manual_seed(client.number("surrogate"))
        for _ in range(self.params.walk_epochs):
            for rows in cut(len(client.current), client.settings.batch, rng):
                inputs = client.examples.inputs(client.current[rows])
                batch: Batch = {"inputs": inputs, "y": client.y[rows], "allowed": allowed, "rng": rng}
                yield self.fit_loss(client.net, batch)


def add_pending_importance(private: Tensors, weights: Weights) -> Tensors:
    """Ω plus the pending importance, and the broadcast model as its reference; empty if nothing is pending."""
    updated: Tensors = {}
    keys = [k.removeprefix("pending/") for k in private if k.startswith("pending/")]
    for key in keys:
        block, name = key.split(".", 1)
        pending = private[f"pending/{key}"]
        omega = private.get(f"omega/{key}")
        updated[f"omega/{key}"] = pending if omega is None else omega + pending
        updated[f"reference/{key}"] = weights[block][name]
    return updated


def parameters_of(net: Net) -> Tensors:
    """The model's parameters by block and name, without buffers."""
    parameters: Tensors = {}
    for block in MODEL:
        for name, parameter in getattr(net, block).named_parameters():
            parameters[f"{block}.{name}"] = parameter
    return parameters


METHOD = FedSSI
