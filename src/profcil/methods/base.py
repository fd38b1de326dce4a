"""What a federated class-incremental method is: one class, a client half and a server half, no hidden state.

A method holds only its frozen `Params`. What must survive a call goes in and comes out: the server's blocks, and a
client's private tensors. The defaults here are FedAvg, so a method overrides what it changes and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from profcil.config import Checked, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.engine.client import Client, Lens
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.engine.server import Server
from profcil.model import losses
from profcil.model.net import MODEL, Net, Weights


@dataclass(frozen=True)
class Params(Checked):
    """Settings of a plain method."""

    label_space: str = setting(
        "seen", "classes the training loss competes over: all seen, or local ones", choices=("seen", "local")
    )


@dataclass(frozen=True)
class Samples:
    """What a method replays of a class."""

    space: str  # inputs, base (features before the adapter) or adapted (after it)
    tensors: tuple[Tensor, ...]


class Method:
    """FedAvg: broadcast the model, train it on current data, average by example counts."""

    Params: ClassVar[type] = Params
    modalities: ClassVar[frozenset[str]] = frozenset({"image", "text", "graph"})
    kinds: ClassVar[frozenset[str]] = frozenset({"model"})  # what may cross the door; the engine enforces it
    server_gradients: ClassVar[bool] = False  # whether `train_server` does anything; gradients are off elsewhere
    regimes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # budget regime → the settings it stands for

    def __init__(self, params: Any) -> None:
        self.params = params

    @classmethod
    def misfit(cls, net: Net) -> str:
        """Why the method cannot run with this model on this data; empty where it can."""
        given, fits = net.facts.modality, ", ".join(sorted(cls.modalities))
        return "" if given in cls.modalities else f"{cls.__name__} is made for {fits}, not for {given}"

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        """Adds the method's own trainable blocks to the model skeleton (`net.attach`), drawn from this generator.
        `like` are the encoder's inputs for no example at all: shapes and types. `begin` finds them in its weights."""

    def begin(self, weights: Weights) -> ServerState:
        """The server's state before the stream, from the shared warmed model."""
        return ServerState().put_weights(weights)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """Names of the blocks a participant needs this round."""
        return MODEL

    def broadcast_to(self, client: int, state: ServerState, when: When) -> Sequence[str]:
        """The same for one participant, where some of it is meant for that client alone."""
        return self.broadcast(state, when)

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """The client's part of a round."""
        allowed = client.allowed(self.label_space(client, inbox))
        done = yield client.train("fit", weights_of(inbox), MODEL, self.fit_loss, allowed=allowed)
        return reply(client, done.weights, MODEL, loss=done.loss)

    fit_loss: Callable[[Net, Batch], Tensor] = staticmethod(losses.supervised)

    def label_space(self, client: Client, inbox: Inbox) -> tuple[int, ...]:
        return client.seen if self.params.label_space == "seen" else client.labels

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """Θ^g ← Σ ω_c Θ_c over the blocks that clients sent; a block nobody changed stays as it is, to the bit."""
        return state.put_weights(average(replies)) if replies else state

    def opens(self, state: ServerState, when: When) -> bool:
        """Whether clients are asked for statistics under the broadcast model before this round."""
        return False

    def surveys(self, when: When) -> bool:
        """Whether clients are asked for statistics under the aggregated model after this round."""
        return False

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("base",)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Statistics under the aggregated model; no gradients."""
        raise NotImplementedError

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """What the server makes of the statistics."""
        raise NotImplementedError

    def end_position(self, state: ServerState, when: When) -> ServerState:
        return state

    def trains(self, when: When) -> bool:
        """Whether the server trains now: after an opening survey (stage `refresh`), or at the end of a round."""
        return False

    def train_server(self, server: Server, state: ServerState) -> ServerState:
        """The one place where a server takes gradients; its time is recorded as the server's."""
        raise NotImplementedError

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        """Class-mean memories for the diagnostics: each block, and the map from base features to its space."""
        return {}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Up to `count` samples of what is replayed of a class now, for the diagnostics; None where nothing is.
        `clients` come with their private memory."""
        return None

    def views(self, state: ServerState, under: Callable[[Lens], Tensor]) -> Tensor:
        """What `scores` sees of some examples, which `under` looks at through a base or any
        function of their inputs: the global base's features."""
        return under(state.blocks["base"])

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        """Class scores from base features under the loaded global model; prediction is their masked arg-max."""
        return net.classify(features)


def reply(client: Client, weights: Weights, blocks: Sequence[str], /, loss: float | Tensor, **more: Block) -> Reply:
    """A turn's reply: the trained blocks, anything else the method sends, and the number of examples behind it."""
    model = {name: Block("model", weights[name]) for name in blocks}
    notes = {"loss": loss, "extra_bytes": float(client.extra_bytes)}
    return Reply(client.id, len(client.current), {**model, **more}, notes=notes)


def with_replay(client: Client, answer: Reply, epochs: int, quota: int, served: float) -> Reply:
    """The reply with a note for the log: replays that a budget of `quota` a class and epoch asks for, of all classes
    that are old for this client, and what an epoch was served."""
    asked = quota * len(set(client.seen) - set(client.labels))
    counts = {"replay_requested": float(epochs * asked), "replay_served": float(epochs * served)}
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
