"""MFCL (Babakniya et al., NeurIPS 2023): one generator, kept over tasks, from which clients draw their own replay.

Kept: at a position's end the server goes on training its generator against the frozen global model, with batches of
128 and Adam at 1e-3, down CE(logits/1000, arg-max) + (1 − H(p̄)/log K) + 50·(mean KL between the Gaussians of
BatchNorm statistics and of the batch) + 0.001·‖x − blurred x‖². Clients draw images and label them by the teacher's
arg-max. Their loss is CE over current classes on real examples, plus CE of the head alone (features detached) over old
and current classes on real and made ones, plus 0.1·Σ_k (w_k·z − w_k·z*)²/K along the K rows of the old head, on both.

Stored: on the server a generator, and within a position the model it started from; on a client nothing of its own,
but the generator and that model as they were sent.

Adapted to client-specific orders: old are the classes that the generator was trained for and the client does not have
now, as masks instead of slices; what it makes of a current class is not used. It is unconditional, so a turn draws
`draws` images for every one that an epoch needs and balances them: B of each old class and local epoch, repeated where
there are fewer. A class of which none was drawn is not replayed: `replay_served` falls short of `replay_requested`,
and `drawn_CLASS` counts what was drawn, over a round's clients; where nothing was, the loss is that of real examples
alone. Without old classes it is CE over current ones. `label_space = "seen"` has that CE compete over all seen
classes. Images are bytes from a sigmoid, where the authors normalise the output of a tanh; as theirs, they are not
augmented. The teacher answers plain images, once a turn. z are the features behind the adapter, before the one global
head.

The teacher is the model that a position starts from. In the first round that is the broadcast itself; later it is sent
to whoever takes part and has not got it.
Left out: decay of the learning rate within a task; the protocol's own optimiser is used.
Uncertain: the authors' default is 100 iterations a task, and they advise more for real runs; 200 is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState
from profcil.engine.phases import Batch, Train, Turn
from profcil.engine.server import Server
from profcil.methods.base import Method, Params, Samples, reply, with_replay
from profcil.methods.parts.distillation import Mixed, along_head, mean_of, outputs, viewed
from profcil.methods.parts.generator import (
    Generator,
    Statistics,
    blur,
    descend,
    divergence,
    frozen,
    half,
    imbalance,
    lacking,
    made_adam,
    make_generator,
    outdated,
    roughness,
    samples,
)
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Weights

START = "start/"  # before the names of the starting model's blocks


@dataclass(frozen=True)
class MFCLParams(Params):
    """Settings of MFCL."""

    label_space: str = setting(
        "local", "classes the loss on real examples competes over: local ones, or all seen", choices=("local", "seen")
    )
    budget: int = setting(20, "B: images replayed per old class, client and local epoch; 0 = no replay", low=0)
    draws: float = setting(2.0, "images drawn in a turn for every one that an epoch replays", low=1.0)
    finetune: float = setting(1.0, "weight of the head's own loss over old and current classes", low=0.0)
    distill: float = setting(0.1, "weight of keeping features along the old head", low=0.0)
    iterations: int = setting(200, "generator steps at a position's end", low=1)
    generator_batch: int = setting(128, "images of a generator step", low=2)
    latent: int = setting(1000, "length of the generator's noise", low=1)
    channels: int = setting(0, "channels of the generator; 0 = 128, or 32 for images below 16 pixels", low=0)
    lr_generator: float = setting(0.001, "learning rate of the generator", low=0.0)
    softness: float = setting(1000.0, "divisor of the teacher's logits in the generator's cross-entropy", low=1e-3)
    classify: float = setting(1.0, "weight of that cross-entropy", low=0.0)
    balance: float = setting(1.0, "weight of drawing all classes equally often", low=0.0)
    statistics: float = setting(50.0, "weight of matching BatchNorm statistics", low=0.0)
    smooth: float = setting(0.001, "weight of smooth images", low=0.0)


class MFCL(Method):
    """MFCL."""

    Params = MFCLParams
    modalities = frozenset({"image"})
    kinds = frozenset({"model", "generator"})
    server_gradients = True
    regimes: ClassVar = {"expanded": {"budget": 100}}

    @classmethod
    def misfit(cls, net: Net) -> str:
        return lacking("MFCL", net)

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        net.attach("generator", make_generator(self.params.latent, like, self.params.channels, generator))

    # -- the client's turn ------------------------------------------------------------------------------------------

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        known = bool(state.blocks["generator"].labels)
        start = [START + b for b in MODEL] if known and when.round else []
        return (*MODEL, *(["generator"] if known else []), *start)

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        known = inbox["generator"].labels if "generator" in inbox else ()
        old = tuple(sorted(set(known) - set(client.labels)))
        source, drawn = self.source(client, inbox, old) if old and self.params.budget else (None, {})
        fit = self.fit(client, inbox, old, source)
        done = yield fit
        answer = reply(client, done.weights, MODEL, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed if source else 0)
        return replace(answer, notes={**answer.notes, **drawn})

    def source(self, client: Client, inbox: Inbox, old: tuple[int, ...]) -> tuple[Mixed, dict[str, float]]:
        """The client's own examples and images drawn for this turn, with the teacher's answers to both; and how many
        of each class were drawn."""
        held = {**start_of(inbox), "generator": dict(inbox["generator"].tensors)}
        for tensor in (t for tensors in held.values() for t in tensors.values()):
            client.keep(tensor)
        teacher = frozen(client.net, held)
        rng = torch.Generator(client.y.device).manual_seed(client.number("draw"))
        count = int(self.params.draws * self.params.budget * len(inbox["generator"].labels))
        x, y, target = labelled(teacher, count, inbox["generator"].labels, rng)
        drawn = {f"drawn_{label}": float(n) for label, n in enumerate(torch.bincount(y).tolist()) if n}
        of_old = client.allowed(old)[y]
        made = {"x": client.keep(x[of_old]), "y": y[of_old], "target": target[of_old]}
        (own,) = client.examples.inputs(client.current)
        answers = client.once("answers", lambda: outputs(teacher, own))  # of the model that the position started from
        return Mixed({"x": own, "y": client.y, "target": answers}, made, self.params.budget), drawn

    def fit(self, client: Client, inbox: Inbox, old: tuple[int, ...], source: Mixed | None) -> Train:
        weights = {b: dict(inbox[b].tensors) for b in MODEL}
        allowed = client.allowed(self.label_space(client, inbox))
        if source is None:
            return client.train("fit", weights, MODEL, self.fit_loss, allowed=allowed)
        before, both = client.allowed(old), client.allowed((*client.labels, *old))
        head = start_of(inbox)["head"]["weight"]
        return client.train(
            "fit", weights, MODEL, self.replay_loss, source, allowed=allowed, old=before, both=both, old_head=head
        )

    def replay_loss(self, net: Net, batch: Batch) -> Tensor:
        p, y, tail = self.params, batch["y"], net.tail
        z = tail.adapt(net.base(viewed(net, batch)))
        new = cross_entropy(tail.score(z)[:, None], y[:, None], batch["allowed"])
        head = cross_entropy(tail.score(z.detach()), y, batch["both"])
        kept = along_head(Tail({}, {"weight": batch["old_head"]}, net.cosine).score(z), batch["target"], batch["old"])
        return mean_of(new, batch["real"]) + p.finetune * head + p.distill * kept.mean()

    # -- the server -------------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        """The generator's labels are the classes it has been trained for: none yet."""
        model = {b: weights[b] for b in MODEL}
        return super().begin(model).put(generator=Block("generator", weights["generator"]))

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """A position's first round leaves its starting model behind, for those who take part later."""
        if when.round == 0:
            state = state.also(**{START + b: b for b in MODEL})
        return super().aggregate(state, replies, when)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        return state.drop(*(START + b for b in MODEL))

    def trains(self, when: When) -> bool:
        return when.stage == "round" and when.final and self.params.budget > 0

    def train_server(self, server: Server, state: ServerState) -> ServerState:
        """Some more steps of the generator, against the model as it is now."""
        if not outdated(state, "generator"):
            return state
        teacher = frozen(server.net, {b: dict(state.blocks[b].tensors) for b in (*MODEL, "generator")})
        generator = generator_of(teacher).requires_grad_().train()
        self.improve(generator, teacher, server)
        trained = teacher.requires_grad_(False).weights(["generator"])["generator"]
        return state.put(generator=Block("generator", trained, server.seen))

    def improve(self, generator: Generator, teacher: Net, server: Server) -> None:
        p, own, device = self.params, list(generator.parameters()), next(teacher.parameters()).device
        adam = made_adam({"params": own, "lr": p.lr_generator})
        rng = torch.Generator(device).manual_seed(server.number("noise"))
        seen, kernel = torch.tensor(server.seen, device=device), blur(server.like[0].shape[1], device)
        z = torch.zeros(p.generator_batch, generator.latent, device=device)

        def step() -> None:
            with half(teacher):
                x = generator(z)
                logits = teacher(x).float()[:, seen]
            loss = self.generator_loss(logits, statistics) + p.smooth * roughness(x.float(), kernel)
            descend(adam, own, torch.autograd.grad(loss, own))

        again = server.repeated(step)
        with Statistics(teacher.base) as statistics:
            for _ in range(p.iterations):
                z.copy_(generator.noise(p.generator_batch, rng))
                again()

    def generator_loss(self, logits: Tensor, statistics: Statistics) -> Tensor:
        p = self.params
        loss = p.classify * F.cross_entropy(logits / p.softness, logits.argmax(1)) + p.balance * imbalance(logits)
        return loss + p.statistics * divergence(statistics.batch, statistics.learned, statistics.layer)

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Of four draws a class that is wanted, those that the present model takes for it."""
        block = state.blocks["generator"]
        if label not in block.labels:
            return None
        teacher = frozen(net, {b: dict(state.blocks[b].tensors) for b in (*MODEL, "generator")})
        x, y, _ = labelled(teacher, 4 * count * len(block.labels), block.labels, rng)
        x = x[y == label][:count]
        return Samples("inputs", (x,)) if len(x) else None


def generator_of(net: Net) -> Generator:
    return net.get_submodule("generator")  # type: ignore[return-value]


def start_of(inbox: Inbox) -> Weights:
    """The model that the position started from: in its first round, the one that is broadcast."""
    return {b: dict(inbox.get(START + b, inbox[b]).tensors) for b in MODEL}


def labelled(teacher: Net, count: int, known: Sequence[int], rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Images, the classes a teacher gives them among those it knows, and its logits."""
    x = samples(teacher, generator_of(teacher), count, rng)
    logits, ids = outputs(teacher, x), torch.tensor(known, device=x.device)
    return x, ids[logits[:, ids].argmax(1)], logits


METHOD = MFCL
