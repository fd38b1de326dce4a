r"""MFCL (Babakniya et al., NeurIPS 2023): one generator for all tasks, from which clients draw images to replay.

Kept: at a position's end the server continues to train its generator against the frozen global model, with batches of
128 and Adam at 1e-3. It minimises CE(logits/1000, arg-max) + (1 − H(p̄)/log K) + 50·(mean KL between the Gaussians of
BatchNorm statistics and of the batch) + 0.001·‖x − blurred x‖². Clients draw images and label them by the teacher's
arg-max. Their loss has three terms: CE over current classes on real examples; CE of the head alone (features detached)
over old and current classes on real and generated examples; 0.1·Σ_k (w_k·z − w_k·z*)²/K along the K rows of the old
head, on both.

Loss: $`\mathcal{L} = \mathrm{CE}_C(f_w(x), y) + \gamma \, \mathrm{CE}_{O \cup C}(h_w(\bar{z}), y) + \frac{\kappa}{K}
\sum_{k \in O} (w_k z - w_k z^{\star})^2`$: the first term over real examples, the others over real and generated ones,
with old classes $`O`$, features $`\bar{z}`$ without gradient and $`z^{\star}`$ of the teacher; $`\gamma`$ = `finetune`,
$`\kappa`$ = `distill`.

Choose it when: the data are images, clients may store nothing, the server may train, and a generator is cheaper to send
than images.

Stored: on the server a generator, which classes were trained, and within a position the model it started from; on a
client nothing of its own, but the generator and that model as they were sent.

Adapted to client-specific orders: the generator is trained for the classes that some client has trained, as clients'
replies report. A seen class that no participant has had yet is left out: the teacher's row for it is random. Old are
the classes that the generator was trained for and that are not current for the client, as masks instead of slices.
Generated images of current classes are not used. The generator is unconditional, so a turn draws `draws` images for
each one that an epoch needs and balances them: B of each old class and local epoch, repeated if there are fewer. A
class of which no image was drawn is not replayed: then `replay_served` is below `replay_requested`. `drawn_CLASS`
counts the drawn images of a class over a round's clients. If no image of an old class was drawn, the loss is that of
real examples alone. Without old classes it is CE over current ones. `label_space = "seen"` makes that CE compete over
all seen classes. Images are bytes from a sigmoid, where the authors normalise the output of a tanh. As in the original
they are not augmented. The teacher's logits are computed once a turn, on images without augmentation. z are the
features after the adapter, before the one global head.

The teacher is the model that a position starts from. In the first round that is the broadcast model itself; later it is
sent to participants that do not hold it.
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
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Train, Turn
from profcil.engine.server import Server
from profcil.methods.base import Samples
from profcil.methods.parts.data_free import DataFreeParams, DataFreeReplay
from profcil.methods.parts.distillation import (
    MixedSource,
    augment_real,
    masked_mean,
    old_head_distance,
    teacher_logits,
)
from profcil.methods.parts.generator import (
    BatchNormStatistics,
    Generator,
    apply_gradients,
    blur_kernel,
    gaussian_divergence,
    generate_images,
    imbalance,
    is_outdated,
    load_frozen,
    make_adam,
    make_generator,
    roughness,
)
from profcil.methods.parts.starting_model import count_memory, start_names, start_weights, store_start
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Tail, Weights

DIAGNOSTIC_DRAWS = 4  # images drawn per class for each one that the diagnostics ask for


@dataclass(frozen=True)
class MFCLParams(DataFreeParams):
    """Settings of MFCL."""

    draws: float = setting(2.0, "images drawn in a turn for each one that an epoch replays", low=1.0)
    finetune: float = setting(1.0, "weight of the head's own loss over old and current classes", low=0.0)
    distill: float = setting(0.1, "weight of preserving features along the old head", low=0.0)
    iterations: int = setting(200, "generator steps at a position's end", low=1)
    generator_batch: int = setting(128, "images of a generator step", low=2)
    latent: int = setting(1000, "length of the generator's noise", low=1)
    channels: int = setting(0, "channels of the generator; 0 = 128, or 32 for images below 16 pixels", low=0)
    lr_generator: float = setting(0.001, "learning rate of the generator", low=0.0)
    softness: float = setting(1000.0, "divisor of the teacher's logits in the generator's cross-entropy", low=1e-3)
    classify: float = setting(1.0, "weight of that cross-entropy", low=0.0)
    balance: float = setting(1.0, "weight of generating all classes equally often", low=0.0)
    statistics: float = setting(50.0, "weight of matching BatchNorm statistics", low=0.0)
    smooth: float = setting(0.001, "weight of smooth images", low=0.0)


class MFCL(DataFreeReplay):
    """MFCL."""

    Params = MFCLParams
    title = "MFCL"
    kinds = frozenset({"model", "generator", "statistics"})
    regimes: ClassVar = {"expanded": {"budget": 100}}

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        module = make_generator(self.params.latent, like, self.params.channels, generator)
        net.attach("generator", module)

    # -- the client's turn ------------------------------------------------------------------------------------------

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        if not state.blocks["generator"].labels:  # not trained yet
            return MODEL
        start = start_names(MODEL) if when.round else ()
        return (*MODEL, "generator", *start)

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        known = inbox["generator"].labels if "generator" in inbox else ()
        old = tuple(sorted(set(known) - set(client.labels)))
        source = None
        drawn: dict[str, float] = {}
        if old and self.params.budget:
            source, drawn = self.source(client, inbox, old)
        fit = self.fit(client, inbox, old, source)
        answer = yield from self.train_and_reply(client, fit, source)
        return replace(answer, notes={**answer.notes, **drawn})

    def source(self, client: Client, inbox: Inbox, old: tuple[int, ...]) -> tuple[MixedSource, dict[str, float]]:
        """The client's own examples and freshly generated images of old classes, with the teacher's logits for both;
        and the number of images drawn of each class."""
        weights = {**start_weights(inbox, MODEL), "generator": dict(inbox["generator"].tensors)}
        count_memory(client, weights)
        teacher = load_frozen(client.net, weights)
        known = inbox["generator"].labels
        count = int(self.params.draws * self.params.budget * len(known))
        rng = torch.Generator(client.y.device).manual_seed(client.number("draw"))
        x, y, logits = generate_labelled(teacher, count, known, rng)
        counts = torch.bincount(y).tolist()
        drawn = {f"drawn_{label}": float(n) for label, n in enumerate(counts) if n}
        is_old = client.allowed(old)[y]
        generated = {"x": client.keep(x[is_old]), "y": y[is_old], "target": logits[is_old]}
        (own,) = client.examples.inputs(client.current)
        target = client.once("answers", lambda: teacher_logits(teacher, own))  # the teacher is fixed for a position
        real = {"x": own, "y": client.y, "target": target}
        return MixedSource(real, generated, self.params.budget), drawn

    def fit(self, client: Client, inbox: Inbox, old: tuple[int, ...], source: MixedSource | None) -> Train:
        """The training phase: plain cross-entropy without old classes, else the loss with replay."""
        weights = {b: dict(inbox[b].tensors) for b in MODEL}
        allowed = client.allowed(self.label_space(client, inbox))
        if source is None:
            return client.train("fit", weights, MODEL, self.fit_loss, allowed=allowed)
        fit = client.train("fit", weights, MODEL, self.replay_loss, source)
        both = client.allowed((*client.labels, *old))
        old_head = start_weights(inbox, MODEL)["head"]["weight"]
        constants = {"allowed": allowed, "old": client.allowed(old), "both": both, "old_head": old_head}
        return replace(fit, constants=constants)

    def replay_loss(self, net: Net, batch: Batch) -> Tensor:
        params = self.params
        y = batch["y"]
        tail = net.tail
        z = tail.adapt(net.base(augment_real(net, batch)))
        old_tail = Tail({}, {"weight": batch["old_head"]}, net.cosine)
        scores = tail.score(z)
        classification = cross_entropy(scores[:, None], y[:, None], batch["allowed"])
        head_only = cross_entropy(tail.score(z.detach()), y, batch["both"])
        distillation = old_head_distance(old_tail.score(z), batch["target"], batch["old"]).mean()
        loss = masked_mean(classification, batch["real"])
        total: Tensor = loss + params.finetune * head_only + params.distill * distillation
        return total

    # -- the server -------------------------------------------------------------------------------------------------

    def begin(self, weights: Weights) -> ServerState:
        """The labels of the generator's block are the classes that it was trained for: none yet."""
        model = {b: weights[b] for b in MODEL}
        return super().begin(model).put(generator=Block("generator", weights["generator"]))

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        """FedAvg. The starting model is stored in a position's first round, for clients that participate later."""
        if when.round == 0:
            state = store_start(state, MODEL)
        return super().aggregate(state, replies, when)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        return state.drop(*start_names(MODEL))

    def train_server(self, server: Server, state: ServerState) -> ServerState:
        """Trains the generator further, against the present model."""
        if not is_outdated(state, "generator"):
            return state
        classes = state.blocks["trained_classes"].labels
        teacher = load_frozen(server.net, weights_with_generator(state))
        generator = generator_of(teacher).requires_grad_().train()
        self.train_generator(generator, teacher, server, classes)
        trained = teacher.requires_grad_(False).weights(["generator"])["generator"]
        return state.put(generator=Block("generator", trained, classes))

    def train_generator(self, generator: Generator, teacher: Net, server: Server, classes: Sequence[int]) -> None:
        params = self.params
        parameters = list(generator.parameters())
        device = next(teacher.parameters()).device
        adam = make_adam({"params": parameters, "lr": params.lr_generator})
        rng = torch.Generator(device).manual_seed(server.number("noise"))
        ids = torch.tensor(classes, device=device)
        kernel = blur_kernel(server.like[0].shape[1], device)
        z = torch.zeros(params.generator_batch, generator.latent, device=device)

        def step() -> None:
            with teacher.autocast():
                x = generator(z)
                logits = teacher(x).float()[:, ids]
            loss = self.generator_loss(logits, statistics)
            loss = loss + params.smooth * roughness(x.float(), kernel)
            apply_gradients(adam, parameters, torch.autograd.grad(loss, parameters))

        repeated_step = server.repeated(step)
        with BatchNormStatistics(teacher.base) as statistics:
            for _ in range(params.iterations):
                z.copy_(generator.noise(params.generator_batch, rng))
                repeated_step()

    def generator_loss(self, logits: Tensor, statistics: BatchNormStatistics) -> Tensor:
        """The generator's loss without its smoothness term."""
        params = self.params
        classification = F.cross_entropy(logits / params.softness, logits.argmax(1))
        loss = params.classify * classification + params.balance * imbalance(logits)
        divergence = gaussian_divergence(statistics.batch, statistics.running, statistics.layer_mask)
        total: Tensor = loss + params.statistics * divergence
        return total

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Generated images that the present model assigns to the class."""
        known = state.blocks["generator"].labels
        if label not in known:
            return None
        teacher = load_frozen(net, weights_with_generator(state))
        draws = DIAGNOSTIC_DRAWS * count * len(known)
        x, y, _ = generate_labelled(teacher, draws, known, rng)
        x = x[y == label][:count]
        return Samples("inputs", (x,)) if len(x) else None


def weights_with_generator(state: ServerState) -> Weights:
    """The weights of the global model and of the generator."""
    return {b: dict(state.blocks[b].tensors) for b in (*MODEL, "generator")}


def generator_of(net: Net) -> Generator:
    return net.get_submodule("generator")  # type: ignore[return-value]


def generate_labelled(
    teacher: Net, count: int, known: Sequence[int], rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Generated images, the class among `known` that the teacher assigns to each, and its logits."""
    x = generate_images(teacher, generator_of(teacher), count, rng)
    logits = teacher_logits(teacher, x)
    ids = torch.tensor(known, device=x.device)
    assigned = logits[:, ids].argmax(1)
    return x, ids[assigned], logits


METHOD = MFCL
