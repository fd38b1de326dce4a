"""The interface of a federated class-incremental method: one class with a client part and a server part.

A method has no state except its frozen `Params`. The state of the server (blocks) and of a client (private tensors) is
passed in and returned. The defaults are FedAvg, so a method overrides only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from profcil.config import Checked, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client, FeatureMap
from profcil.engine.late import LateStatistics
from profcil.engine.phases import Batch, Turn
from profcil.engine.server import Server
from profcil.engine.summed_replies import Additive
from profcil.model import losses
from profcil.model.dictionary import Dictionary
from profcil.model.net import MODEL, Net, Weights


@dataclass(frozen=True)
class Params(Checked):
    """Settings of a plain method."""

    label_space: str = setting(
        "seen", "classes the training loss competes over: all seen, or local ones", choices=("seen", "local")
    )


@dataclass(frozen=True)
class Samples:
    """Samples that a method replays of one class."""

    space: str  # "inputs", "base" (features before the adapter) or "adapted" (after it)
    tensors: tuple[Tensor, ...]


class Method:
    """FedAvg: broadcast the model, train it on current data, average by example counts."""

    Params: ClassVar[type] = Params
    modalities: ClassVar[frozenset[str]] = frozenset({"image", "text", "graph", "table"})
    kinds: ClassVar[frozenset[str]] = frozenset({"model"})  # kinds of blocks that may be sent; the engine checks it
    exact_kinds: ClassVar[frozenset[str]] = frozenset()  # kinds that must be sent in float32, see `channel.statistics`
    additive: ClassVar[Additive] = {}  # block → how it is a sum over clients, for secure sums; empty = it is none
    # Whether a turn is training on the mean of losses of single examples. A class states it for itself alone.
    mean_of_examples: ClassVar[bool] = False
    server_gradients: ClassVar[bool] = False  # whether `train_server` is used; elsewhere gradients are disabled
    regimes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # budget regime → its settings

    def __init__(self, params: Any) -> None:
        self.params = params

    @classmethod
    def misfit(cls, net: Net) -> str:
        """Why the method cannot run with this model on this data; empty if it can."""
        given = net.facts.modality
        if given in cls.modalities:
            return ""
        supported = ", ".join(sorted(cls.modalities))
        return f"{cls.__name__} is made for {supported}, not for {given}"

    @property
    def class_memories(self) -> tuple[str, ...]:
        """Broadcast blocks with one row for each remembered class, of which a client may be sent some rows alone. The
        first one has the means of features, as "mean"."""
        return ()

    @property
    def has_base(self) -> bool:
        """Whether the base encoder is used, beyond a warm-up that is set for all methods."""
        return "model" in self.kinds

    def exposed(self, unit: str) -> str:
        """Why noise cannot protect what the method sends, for the unit example or client; empty if it can."""
        name = type(self).__name__
        if raw := sorted(self.kinds - {"model", "memory", "statistics", "transport"}):
            return f"{name} sends blocks of kind {raw[0]}, which noise does not protect; choose another method"
        if unit == "example":
            instead = "set privacy.gradient_bound, or " if self.mean_of_examples else ""
            return (
                f"{name} sends model updates, which noise for single examples does not protect; {instead}set "
                "privacy.unit = client, or choose probayes, or prolin with base_rounds = 0"
            )
        return ""

    def releases(self, rounds: Sequence[When]) -> int:
        """How many replies with content a client sends at most, if it takes part in these rounds of one position."""
        return sum(1 + self.surveys(when) for when in rounds)

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """Adds the method's own trainable blocks to the model (`net.attach`), initialised with this generator. `like`
        is an empty batch of encoder inputs, for their shapes and types. `begin` gets the blocks with the weights."""

    def dictionary(self, net: Net, like: Inputs) -> Dictionary | None:
        """The fixed features of the inputs that the method uses; None = none. The engine finds their entries before the
        stream, and `begin` gets these with the weights, as "dictionary". `like` gives the shapes of inputs."""
        return None

    def begin(self, weights: Weights) -> ServerState:
        """The server's state before the stream, from the shared warmed-up model."""
        return ServerState().put_weights(weights)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """Names of the blocks a participant needs this round."""
        return MODEL

    def broadcast_to(self, client: int, state: ServerState, when: When) -> Sequence[str]:
        """The same for one participant; override it if some blocks are for that client only."""
        return self.broadcast(state, when)

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """The client's part of a round: yields training phases, returns the reply."""
        allowed = client.allowed(self.label_space(client, inbox))
        done = yield client.train("fit", weights_of(inbox), MODEL, self.fit_loss, allowed=allowed)
        return reply(client, done.weights, MODEL, loss=done.loss)

    fit_loss: Callable[[Net, Batch], Tensor] = staticmethod(losses.supervised)

    def label_space(self, client: Client, inbox: Inbox) -> tuple[int, ...]:
        """The classes that the training loss competes over."""
        return client.seen if self.params.label_space == "seen" else client.labels

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Θ^g ← Σ ω_c Θ_c over the blocks that clients sent. A block that no client sent stays, to the bit."""
        return state.put_weights(average(replies)) if replies else state

    def opens(self, state: ServerState, when: When) -> bool:
        """Whether clients are asked for statistics under the broadcast model before this round."""
        return False

    def surveys(self, when: When) -> bool:
        """Whether clients are asked for statistics under the aggregated model after this round."""
        return False

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        """Names of the blocks a client needs for `survey`."""
        return ("base",)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """The client's statistics under the model that it was sent; no gradients."""
        raise NotImplementedError

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """The server's state after the statistics of `survey`."""
        raise NotImplementedError

    def reported(self, state: ServerState) -> Collection[int]:
        """Clients that are not asked for statistics again in this position, because the server has theirs."""
        return ()

    def end_position(self, state: ServerState, when: When) -> ServerState:
        """The server's state at the end of a position."""
        return state

    def trains(self, when: When) -> bool:
        """Whether the server trains now: after the statistics of `opens` (stage "refresh"), or after a round."""
        return False

    def train_server(self, server: Server, state: ServerState) -> ServerState:
        """Training on the server, the only place where it may use gradients. Its time is recorded as server time."""
        raise NotImplementedError

    # -- replies that arrive late, with clock.mode = "buffer" ----------------------------------------------------------

    def late_misfit(self) -> str:
        """Why the method cannot use replies that arrive late; empty if it can. By default it can if it sends models
        alone; a method with other blocks, whose replies belong to one round, overrides this and the hooks below."""
        others = sorted(self.kinds - {"model"})
        if not others and not self.server_gradients:
            return ""
        what = f"sends blocks of kind {others[0]}, which it uses" if others else "trains on the server"
        return f"{type(self).__name__} {what} in the round in which they are asked for, so none may arrive late"

    def moving(self, when: When) -> Sequence[str]:
        """The model blocks that clients train in this round; none if they do not train. A late reply changes no others
        of the server's."""
        return MODEL

    def memory_base(self, state: ServerState) -> str:
        """The block with the base under which the memory is, where statistics of an earlier position are measured."""
        return "base"

    def rebased(self, reply: Reply, weight: float, when: When) -> Reply:
        """A late reply, whose model blocks have been re-based with this weight, with its other blocks re-based too."""
        return reply

    def add_statistics(
        self, state: ServerState, found: Sequence[LateStatistics], measured: Mapping[int, int], when: When
    ) -> ServerState:
        """The server's state after statistics of `survey` that arrive one by one, maybe late: measured under an older
        base, or at an earlier position. `measured` is the position of the latest statistics of each class."""
        raise NotImplementedError

    # -- diagnostics and prediction ------------------------------------------------------------------------------------

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        """Class-mean memories for the diagnostics: each block, and the map from base features to the block's space."""
        return {}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Up to `count` samples that are replayed of a class, for the diagnostics; None if the class is not replayed.
        `clients` have their private memory."""
        return None

    def views(self, state: ServerState, under: Callable[[FeatureMap], Tensor]) -> Tensor:
        """The features that `scores` needs: by default those of the global base. `under` computes features of the
        examples under a base, or by any function of their inputs."""
        return under(state.blocks["base"])

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Class scores from the features of `views` under the loaded global model. The prediction is the arg-max over
        the allowed classes."""
        return net.classify(features)

    # -- the trained model --------------------------------------------------------------------------------------------

    def deployed(self, state: ServerState) -> ServerState:
        """What a model that leaves the run holds: a state with the same predictions. It should have no more than these
        need. By default that is the model; a method that predicts in its own way keeps everything, unless it overrides
        this, too."""
        own = type(self)
        if own.views is Method.views and own.scores is Method.scores:
            return state.only(*MODEL)
        return state

    def temperature(self, state: ServerState) -> float | None:
        """The number by which the scores of a deployed state are divided to be log-probabilities; None if they are not
        of this kind. The head is trained by cross-entropy, so the default is 1."""
        return 1.0


def reply(client: Client, weights: Weights, blocks: Sequence[str], /, loss: float | Tensor, **more: Block) -> Reply:
    """The reply of a turn: the trained blocks, further blocks of the method, and the number of examples."""
    model = {name: Block("model", weights[name]) for name in blocks}
    notes = {"loss": loss, "extra_bytes": float(client.extra_bytes)}
    return Reply(client.id, len(client.current), {**model, **more}, notes=notes)


def sent_blocks(replies: Sequence[Reply], name: str) -> list[Block]:
    """The blocks of this name in the replies that have one."""
    return [r.blocks[name] for r in replies if name in r.blocks]


def with_replay(client: Client, answer: Reply, epochs: int, quota: int, served: float) -> Reply:
    """The reply with two numbers for the log: how many replays a budget of `quota` per old class and epoch allows, and
    how many were used (`served` per epoch). Old are the seen classes that the client does not observe now."""
    old = set(client.seen) - set(client.labels)
    requested = quota * len(old)
    counts = {"replay_requested": float(epochs * requested), "replay_served": float(epochs * served)}
    return replace(answer, notes={**answer.notes, **counts})


def average(replies: Sequence[Reply]) -> Weights:
    """The example-weighted mean of the model blocks, in the order of the replies."""
    total = sum(r.samples for r in replies)
    mean: Weights = {}
    for r in replies:
        for block, tensors in r.weights().items():
            shares = torch._foreach_mul(list(tensors.values()), r.samples / total)
            if block in mean:
                torch._foreach_add_([mean[block][name] for name in tensors], shares)
            else:
                mean[block] = dict(zip(tensors, shares, strict=True))
    return mean
