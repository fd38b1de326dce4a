r"""HR, Hybrid Replay (Nori, Kim and Wang, ICLR 2025): replay of latent codes of an autoencoder that also classifies.

Kept: the encoder gets a latent layer (μ, log σ²) and a decoder; a class is predicted by the nearest centroid to μ(x).
When classes appear, clients send their mean codes, and the server places centroids for them by a Lennard-Jones
potential; old centroids never move. The loss of an example is ‖x − x̂‖² + KL + λ‖z − p_y‖². After the first position,
‖μ − μ_old‖² + ‖x̂ − x̂_old‖² is added. All terms are divided by the size of an image. A client stores up to B codes a
class, replays them decoded by the old model, and re-encodes them once a position as f_new(g_old(m)). Old classes for
which it has no codes are decoded from p_y + N(0, 1/(1 + 2λ)), the spread at which λ and the prior balance.

Loss: $`\mathcal{L} = \frac{1}{|x|} \left( \rho \lVert x - \hat{x} \rVert^2 + \mathrm{KL} + \lambda \lVert z - p_y
\rVert^2 + \delta \lVert \mu - \mu_o \rVert^2 + \delta \lVert \hat{x} - \hat{x}_o \rVert^2 \right)`$ with codes $`\mu`$
and images $`\hat{x}`$ of the model, $`\mu_o`$ and $`\hat{x}_o`$ of the starting model, and KL from $`N(\mu, \sigma^2)`$
to $`N(0, 1)`$; $`\rho`$ = `rebuild`, $`\lambda`$ = `pull`, $`\delta`$ = `distill`.

Choose it when: the data are images, and clients may store latent codes and train a decoder.

Stored: on the server a centroid of every class, and within a position the model it started from; on a client latent
codes, up to B of a class, and within a position that model.

Departed from: the paper's equation for the centroids ascends the potential, here it is descended. Real and decoded
images get the same augmentations, reflected at borders. With different ones the model could tell decoded images from
real ones, and would learn to predict an old class for all of them.

Adapted: the old model is the global one at the start of a position. In a step it gets the same augmented images and the
same noise as the model that is trained, so that equal models have no distance. `old` are classes learned before the
position and not current for this client, so that only classes are decoded that the old model was trained on.
Participants are asked for new classes before every round (under full accounting that is one more downlink a round),
since a class may appear with a client that did not participate earlier. Codes are computed by the encoder that the
client has just trained, not by the later average, because a client may not participate when a position ends; until then
it stores its codes twice, for this position and for later ones. Replies are weighted by examples, as in all methods.
Centroids start with a small seeded noise, since classes with equal means would never separate. Adapter and head are not
used: they are neither trained nor sent.

Uncertain: the source was a re-implementation from the paper's text. There every term has weight 1 beside λ = 10, over
a hundred rounds. On short streams such a decoder is hardly trained: on digits, decoded images then have no recognisable
class, and `rebuild` = 100 (a standard deviation of 0.07 per pixel) helps much. How the paper chooses examples for codes
is not known; here they are drawn uniformly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.config import Checked, setting
from profcil.data.bundle import Inputs
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Train, Turn
from profcil.engine.server import Server
from profcil.methods.base import Method, Samples, reply, sent_blocks, with_replay
from profcil.methods.parts.centroids import (
    mean_codes,
    negative_distances,
    no_centroids,
    place,
    pool_means,
    sample_around,
    table,
)
from profcil.methods.parts.decoder import (
    DecodedSource,
    autoencode,
    decode,
    encode,
    latent_of,
    latent_size,
    make_decoder,
    make_latent,
)
from profcil.methods.parts.starting_model import (
    START,
    attach_start,
    count_memory,
    start_names,
    start_weights,
    store_start,
)
from profcil.model.layers import unit
from profcil.model.net import Net, Tensors, Weights

BLOCKS = ("base", "latent", "decoder")  # the autoencoder; adapter and head are not used
STARTS = start_names(BLOCKS)


@dataclass(frozen=True)
class HRParams(Checked):
    """Settings of HR."""

    budget: int = setting(20, "B: codes per class on a client, and replays per old class and local epoch", low=0)
    latent: int = setting(0, "length of a latent code; 0 = a tenth of an image's numbers, at least 16", low=0)
    rebuild: float = setting(1.0, "weight of the squared reconstruction error of an image", low=0.0)
    pull: float = setting(10.0, "λ: weight of the squared distance to the class's centroid", low=0.0)
    distill: float = setting(1.0, "weight of the distance to the starting model's codes and images", low=0.0)
    sigma: float = setting(5.0, "σ of the potential between centroids; their equilibrium distance is 1.12 σ", low=1e-3)


class HR(Method):
    """HR."""

    Params = HRParams
    modalities = frozenset({"image"})
    kinds = frozenset({"model", "prototype"})
    server_gradients = True
    regimes: ClassVar = {"expanded": {"budget": 100}}

    def attach(self, net: Net, like: Inputs, generator: torch.Generator) -> None:
        _, channels, height, width = like[0].shape
        shape = (channels, height, width)
        size = self.params.latent or latent_size(shape)
        net.attach("latent", make_latent(net.features, size, generator))
        net.attach("decoder", make_decoder(size, shape, net.base, generator))
        attach_start(net, BLOCKS)

    def begin(self, weights: Weights) -> ServerState:
        """`learned` are the classes that the model of the last position's end can decode."""
        centroids = no_centroids(weights["latent"]["mu.bias"])
        model = {block: tensors for block, tensors in weights.items() if block not in STARTS}
        learned = Block("prototype", {})
        return super().begin(model).put(centroids=centroids, learned=learned)

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """In the first round the model is the starting model. Later that is sent to clients that do not hold it."""
        start = STARTS if when.round else ()
        return (*BLOCKS, "centroids", "learned", *start)

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        start = start_weights(inbox, BLOCKS)
        codes, y = stored_codes(client, inbox)
        source = self.source(client, inbox, start, codes, y)
        if not source.real:  # none of the client's classes has a centroid yet
            return Reply(client.id, 0)
        if inbox["learned"].labels:
            count_memory(client, start)
        fit = self.fit(client, inbox, start, source)
        done = yield fit
        private = self.private(client, start, done.weights, codes, y)
        answer = reply(client, done.weights, BLOCKS, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed)
        return replace(answer, samples=source.real, private=private)

    def fit(self, client: Client, inbox: Inbox, start: Weights, source: DecodedSource) -> Train:
        """The training phase. Before anything is learned there is no old model, and the distillation has weight 0."""
        centroids = table(inbox["centroids"], client.net.classes)
        weight = self.params.distill if inbox["learned"].labels else 0.0
        distill = centroids.new_full((), weight)
        weights = {b: dict(inbox[b].tensors) for b in BLOCKS}
        weights |= {START + b: start[b] for b in BLOCKS}
        return client.train("fit", weights, BLOCKS, self.fit_loss, source, centroids=centroids, distill=distill)

    def source(self, client: Client, inbox: Inbox, start: Weights, codes: Tensor, y: Tensor) -> DecodedSource:
        """Real images of current classes, and images of old classes that the starting model decodes once a turn."""
        own_labels = torch.tensor(client.y_list)
        rows = rows_of_classes(own_labels, inbox["centroids"].labels)
        real = current_images(client, rows)
        replayed_codes, replayed_labels = self.codes_to_replay(client, inbox, codes, y)
        decoded = decode(client.net, start, replayed_codes)
        x = torch.cat([real, decoded])
        labels = torch.cat([own_labels[rows], replayed_labels])
        return DecodedSource(x, client.tensor(labels), self.params.budget, replayed_labels)

    def codes_to_replay(self, client: Client, inbox: Inbox, codes: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The client's codes of old classes and their labels. For an old class without codes, samples around the
        centroid, with the spread at which loss and prior balance, s² = 1/(1 + 2λ)."""
        with_codes = set(y.tolist())
        absent = sorted(set(inbox["learned"].labels) - set(client.labels) - with_codes)
        absent_labels = torch.tensor(absent, dtype=torch.long).repeat_interleave(self.params.budget)
        rng = torch.Generator().manual_seed(client.number("absent"))
        centroids = table(inbox["centroids"], client.net.classes)
        centres = centroids[client.tensor(absent_labels)]
        sampled = sample_around(centres, self.params.pull, rng)
        old = rows_of_classes(y, client.labels, complement=True)
        stored = codes[client.tensor(old)]
        labels = torch.cat([y[old], absent_labels])
        return torch.cat([stored, sampled]), labels

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        """‖x − x̂‖² + KL + λ‖z − p_y‖² and the distance to the starting model, divided by the size of an image."""
        params = self.params
        centroids = batch["centroids"]
        rng = batch["rng"]
        (x,) = net.weak((batch["x"],), rng)
        noise = torch.randn(len(x), centroids.shape[1], generator=rng, device=x.device)
        mu, logvar, z, image = autoencode(net, x, noise)
        with torch.no_grad():
            old_mu, _, _, old_image = autoencode(net, x, noise, START)
        prior = (mu.square() + logvar.exp() - 1 - logvar).sum(1) / 2
        to_centroid = squared_norm(z - centroids[batch["y"]])
        to_old = squared_norm(mu - old_mu) + squared_norm(image - old_image)
        reconstruction = squared_norm(x - image)
        loss: Tensor = params.rebuild * reconstruction + prior + params.pull * to_centroid + batch["distill"] * to_old
        return loss.mean() / x[0].numel()

    def private(self, client: Client, start: Weights, weights: Weights, codes: Tensor, y: Tensor) -> Tensors:
        """The client's private state: its codes for the rest of this position, and those for later ones. The latter
        are computed by the model that was just trained, up to B of a class; old ones are re-encoded as
        f_new(g_old(m))."""
        rng = torch.Generator().manual_seed(client.number("keep"))
        order = torch.randperm(len(client.current), generator=rng)
        labels = torch.cat([torch.tensor(client.y_list)[order], y])
        stored = torch.nonzero(first_of_each(labels, self.params.budget)).flatten()
        current = current_images(client, order)
        decoded = decode(client.net, start, codes)
        images = torch.cat([current, decoded])[client.tensor(stored)]
        later = encode(client.net, weights, images)
        position = torch.tensor(client.when.position)
        private = {"codes": codes, "y": y, "later": later, "later_y": labels[stored], "position": position}
        return {name: client.keep(tensor) for name, tensor in private.items()}

    # -- centroids --------------------------------------------------------------------------------------------------

    def opens(self, state: ServerState, when: When) -> bool:
        return True  # a class may appear with a client that participates in a later round only

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        # The survey replaces the client's model. Naming the starting blocks here lets the client retain the old one, so
        # that it need not be sent again.
        start = STARTS if when.round else ()
        return ("base", "latent", "centroids", *start)

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Mean codes of the classes that have no centroid yet."""
        own_labels = torch.tensor(client.y_list)
        rows = rows_of_classes(own_labels, inbox["centroids"].labels, complement=True)
        if not len(rows):
            return Reply(client.id, len(client.current))
        latent = inbox["latent"].tensors
        features = client.features(inbox["base"])[client.tensor(rows)]
        mu = F.linear(features, latent["mu.weight"], latent["mu.bias"])
        means = mean_codes(mu, own_labels[rows])
        return Reply(client.id, len(client.current), {"means": means})

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        means = sent_blocks(replies, "means")
        if STARTS[0] not in state.blocks and state.blocks["learned"].labels:
            state = store_start(state, BLOCKS)
        return state.put(means=pool_means(means)) if means else state

    def trains(self, when: When) -> bool:
        return when.stage == "refresh"

    def train_server(self, server: Server, state: ServerState) -> ServerState:
        """New centroids descend the potential from their classes' mean codes; old ones do not move."""
        if "means" not in state.blocks:
            return state
        rng = torch.Generator().manual_seed(server.number("centroids"))
        placed = place(state.blocks["centroids"], state.blocks["means"], self.params.sigma, rng)
        return state.drop("means").put(centroids=placed)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        trained = [r for r in replies if r.blocks]
        return super().aggregate(state, trained, when)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        learned = Block("prototype", {}, state.blocks["centroids"].labels)
        return state.drop(*STARTS).put(learned=learned)

    # -- prediction and diagnostics ---------------------------------------------------------------------------------

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        codes = latent_of(net).mu(features)
        return negative_distances(codes, state.blocks["centroids"], net.classes)

    def deployed(self, state: ServerState) -> ServerState:
        return state.only("base", "latent", "centroids")

    def temperature(self, state: ServerState) -> float | None:
        """Distances to centroids are no log-probabilities."""
        return None

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"centroids": (state.blocks["centroids"], latent_of(net).mu)}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Decoded codes of the clients; if no client has a code of the class, decoded samples around its centroid."""
        if label not in state.blocks["learned"].labels or not self.params.budget:
            return None
        centroid = table(state.blocks["centroids"], net.classes)[label]
        stored = [centroid[None][:0]]
        for client in clients:
            if client.private:
                of_class = client.private["later_y"] == label
                stored.append(client.private["later"][of_class])
        codes = torch.cat(stored)
        chosen = torch.randperm(len(codes), generator=rng, device=rng.device)[:count]
        codes = codes[chosen.to(codes.device)]
        if not len(codes):
            codes = sample_around(centroid.expand(count, -1), self.params.pull, rng)
        weights = state.weights()
        images = decode(net, {b: weights[b] for b in BLOCKS}, codes)
        return Samples("inputs", (images,))


def squared_norm(x: Tensor) -> Tensor:
    """The squared norm of each row."""
    return x.flatten(1).square().sum(1)


def current_images(client: Client, rows: Tensor) -> Tensor:
    """The images of some of the client's current examples, with numbers in [0, 1]."""
    examples = client.current[client.tensor(rows)]
    (images,) = client.examples.inputs(examples)
    return unit(images)


def stored_codes(client: Client, inbox: Inbox) -> tuple[Tensor, Tensor]:
    """The client's codes under the starting model, and their labels, on the CPU."""
    private = client.private
    if not private:
        no_codes = inbox["centroids"].tensors["mean"][:0]
        return no_codes, torch.zeros(0, dtype=torch.long)
    if int(private["position"]) < client.when.position:
        return private["later"], private["later_y"].cpu()
    return private["codes"], private["y"].cpu()


def rows_of_classes(y: Tensor, labels: Sequence[int], complement: bool = False) -> Tensor:
    """The rows whose class is in `labels`, or with `complement` those whose class is not."""
    member = torch.isin(y, torch.tensor(labels, dtype=y.dtype))
    return torch.nonzero(member != complement).flatten()


def first_of_each(y: Tensor, quota: int) -> Tensor:
    """The mask of the rows that are among the first `quota` of their class."""
    counts = F.one_hot(y).cumsum(0)
    rank = counts.gather(1, y[:, None])[:, 0]  # counted from 1
    return rank <= quota


METHOD = HR
