r"""FedAvg (McMahan et al., 2017): local training on the current task, averaging weighted by example counts.

Kept: everything. It is the base class, unchanged.

Loss: $`\mathcal{L}(w) = \mathrm{CE}_S(f_w(x), y)`$.

Choose it when: you need the baseline that traffic and forgetting are measured against. It keeps little more than the
last task.

Stored: on the server nothing; on a client nothing.

Adapted: the model is the shared encoder, adapter and single head; cross-entropy competes over all classes introduced
to the federation so far (`label_space = "seen"`).
"""

from profcil.methods.base import Method
from profcil.methods.parts.addends import MODEL_MEANS


class FedAvg(Method):
    """FedAvg."""

    additive = MODEL_MEANS
    mean_of_examples = True


METHOD = FedAvg
