"""What TARGET and MFCL share: the server trains a generator of images, and clients replay generated images.

The generator is trained at the end of a position, against the frozen global model and its BatchNorm statistics. Images
are generated only of classes that some client has trained: the labels in the clients' replies, over all rounds so far.
With client-specific orders a class may be seen, i.e. introduced, without any participant that has it; the head's row
for it is still random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from profcil.config import setting
from profcil.engine.channel import Block, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.phases import Train, Turn
from profcil.methods.base import Method, Params, reply, with_replay
from profcil.methods.parts.distillation import MixedSource
from profcil.methods.parts.generator import explain_missing_batchnorm
from profcil.model.net import MODEL, Net, Weights


@dataclass(frozen=True)
class DataFreeParams(Params):
    """Settings of a method that replays generated images."""

    label_space: str = setting(
        "local", "classes the loss on real examples competes over: local ones, or all seen", choices=("local", "seen")
    )
    budget: int = setting(20, "B: images replayed per old class, client and local epoch; 0 = no replay", low=0)


class DataFreeReplay(Method):
    """A method that replays generated images."""

    Params = DataFreeParams
    title: ClassVar[str]  # the method's name in messages
    modalities = frozenset({"image"})
    server_gradients = True

    @classmethod
    def misfit(cls, net: Net) -> str:
        return explain_missing_batchnorm(cls.title, net)

    def train_and_reply(self, client: Client, fit: Train, source: MixedSource | None) -> Turn:
        """Trains the whole model and reports the classes; `source` is where replayed images come from, if there are
        any."""
        done = yield fit
        classes = class_list(client.labels)
        answer = reply(client, done.weights, MODEL, loss=done.loss, trained_classes=classes)
        replayed = source.replayed if source else 0
        return with_replay(client, answer, fit.epochs, self.params.budget, replayed)

    def begin(self, weights: Weights) -> ServerState:
        """`trained_classes` are the classes that some client has trained: none yet."""
        return super().begin(weights).put(trained_classes=class_list(()))

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg, and the classes that clients have trained."""
        trained = {*state.blocks["trained_classes"].labels}
        for r in replies:
            trained.update(r.blocks["trained_classes"].labels)
        classes = class_list(sorted(trained))
        return super().aggregate(state, replies, when).put(trained_classes=classes)

    def trains(self, when: When) -> bool:
        budget: int = self.params.budget
        return when.stage == "round" and when.final and budget > 0


def class_list(labels: Sequence[int]) -> Block:
    """A block of class ids alone."""
    return Block("statistics", {}, tuple(labels))
