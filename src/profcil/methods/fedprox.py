r"""FedProx (Li et al., 2020): FedAvg with a proximal term towards the broadcast model.

Kept: the objective CE + (μ/2)‖w − w_g‖² over all parameters. BatchNorm's running statistics are not in the term.

Loss: $`\mathcal{L}(w) = \mathrm{CE}_S(f_w(x), y) + \frac{\mu}{2} \lVert w - w_g \rVert^2`$ with the broadcast model
$`w_g`$.

Choose it when: clients drift apart within a round and you want FedAvg with one more term. It does not prevent
forgetting on the benchmarks here.

Stored: on the server nothing; on a client nothing.

Adapted: as FedAvg. `mu` = 0.01 is the value most federated class-incremental studies use.
"""

from __future__ import annotations

from dataclasses import dataclass

from profcil.config import setting
from profcil.engine.channel import Inbox, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Turn
from profcil.methods.base import Method, Params, reply
from profcil.methods.parts.addends import MODEL_MEANS
from profcil.model.net import MODEL


@dataclass(frozen=True)
class FedProxParams(Params):
    """Settings of FedProx."""

    mu: float = setting(0.01, "μ of the proximal term (μ/2)‖w − w_g‖²", low=0.0)


class FedProx(Method):
    """FedProx."""

    Params = FedProxParams
    params: FedProxParams
    additive = MODEL_MEANS
    mean_of_examples = True

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        allowed = client.allowed(self.label_space(client, inbox))
        factor = self.params.mu / 2
        weights = weights_of(inbox)
        done = yield client.train("fit", weights, MODEL, self.fit_loss, proximal=factor, allowed=allowed)
        return reply(client, done.weights, MODEL, loss=done.loss)


METHOD = FedProx
