"""FedProx (Li et al., 2020): FedAvg with a proximal pull towards the broadcast model.

Kept: the objective CE + (μ/2)‖w − w_g‖² over all parameters; BatchNorm's running statistics are not pulled.

Stored: on the server nothing; on a client nothing.

Adapted: as FedAvg. `mu` = 0.01 is the value most federated class-incremental studies use.
"""

from __future__ import annotations

from dataclasses import dataclass

from profcil.config import setting
from profcil.engine.client import Client
from profcil.engine.payload import Inbox, weights_of
from profcil.engine.phases import Turn
from profcil.methods.base import Method, Params, reply
from profcil.model.net import MODEL


@dataclass(frozen=True)
class FedProxParams(Params):
    mu: float = setting(0.01, "strength of the pull, with the customary factor one half", low=0.0)


class FedProx(Method):
    """FedProx."""

    Params = FedProxParams

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        allowed = client.allowed(self.label_space(client, inbox))
        pull = self.params.mu / 2
        done = yield client.train("fit", weights_of(inbox), MODEL, self.fit_loss, proximal=pull, allowed=allowed)
        return reply(client, done.weights, MODEL, loss=done.loss)


METHOD = FedProx
