"""HR, Hybrid Replay (Nori, Kim and Wang, ICLR 2025): exemplars kept as latent codes of an autoencoder that classifies.

Kept: the encoder gets a latent layer (μ, log σ²) and a decoder; a class is predicted by the nearest centroid to μ(x).
When classes appear, clients send their mean codes, and the server places centroids for them by a Lennard-Jones
potential; old centroids never move. The loss of an example is ‖x − x̂‖² + KL + λ‖z − p_y‖², and, once there is a
model to keep, ‖μ − μ_old‖² + ‖x̂ − x̂_old‖², all over the size of an image. A client stores up to B codes a class,
replays them decoded by the old model, and re-encodes them once a position as f_new(g_old(m)); classes that it has no
codes of are decoded from p_y + N(0, 1/(1 + 2λ)), the spread at which λ and the prior balance.

Stored: on the server a centroid of every class, and within a position the model it started from; on a client latent
codes, up to B of a class, and within a position that model.

Departed from: the paper's equation for the centroids climbs the potential, here it is descended. Old codes and images
are targets computed once a turn from plain examples, and an old image is moved by the same crop and flip as the
example. Real and decoded images pass through the same views, reflected at borders, since any other treatment tells
them apart and "looks decoded" would come to mean "old".

Adapted: the old model is the global one at the start of a position. `old` are classes learned before the position and
not current for this client, so that nothing is decoded that the model has never seen. Participants are asked for new
classes before every round (under full accounting that is one more downlink a round), as a class may come with a client
that is not drawn earlier. Codes are written by the encoder that the client has just trained, not by the later
average, because a client may not be there when a position ends; until then it holds its codes twice, for this
position and for later ones. Replies are weighted by examples as everywhere. Centroids start from a slight seeded
shake, since classes with equal means would never part. Adapter and head rest; they neither train nor travel.

Uncertain: the source was a re-implementation from the paper's text. There every term has weight 1 beside λ = 10, over
a hundred rounds. Short streams leave such a decoder untrained: on digits, decoded memory has then no recognisable
class, and `rebuild` = 100 (pixels with a deviation of 0.07) helps much. Which examples become codes is not known; here
they are drawn evenly.
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
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState
from profcil.engine.phases import Batch, Turn
from profcil.engine.server import Server
from profcil.methods.base import Method, Samples, reply, with_replay
from profcil.methods.parts.centroids import around, closeness, mean_codes, nowhere, place, pooled, table
from profcil.methods.parts.decoder import Mixture, decode, encode, halves, latent_size, make_decoder, make_latent
from profcil.model.layers import unit
from profcil.model.net import Net, Tensors, Weights

BLOCKS = ("base", "latent", "decoder")  # the autoencoder; adapter and head rest
STARTS = tuple(f"start/{b}" for b in BLOCKS)  # where a position began


@dataclass(frozen=True)
class HRParams(Checked):
    """Settings of HR."""

    budget: int = setting(20, "B: codes per class on a client, and replays per old class and local epoch", low=0)
    latent: int = setting(0, "length of a latent code; 0 = a tenth of an image's numbers, at least 16", low=0)
    rebuild: float = setting(1.0, "weight of the squared error of an image", low=0.0)
    pull: float = setting(10.0, "λ: weight of the squared distance to the class's centroid", low=0.0)
    distill: float = setting(1.0, "weight of the pull towards the starting model's codes and images", low=0.0)
    sigma: float = setting(5.0, "σ of the potential between centroids, which rest 1.12 σ apart", low=1e-3)


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

    def begin(self, weights: Weights) -> ServerState:
        """`learned` are the classes that the model of the last position's end can decode."""
        nothing = nowhere(weights["latent"]["mu.bias"])
        return super().begin(weights).put(centroids=nothing, learned=Block("prototype", {}))

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        """In the first round the model is the starting model; later that is sent to whoever has not got it."""
        return (*BLOCKS, "centroids", "learned", *(STARTS if when.round else ()))

    # -- the client's turn ------------------------------------------------------------------------------------------

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        start = starting(inbox)
        codes, y = recalled(client, inbox)
        source = self.mixture(client, inbox, start, codes, y)
        if not source.real:  # none of its classes has a centroid yet
            return Reply(client.id, 0)
        centroids = table(inbox["centroids"], client.net.classes)
        if inbox["learned"].labels:
            hold(client, start)
        distill = centroids.new_full((), self.params.distill if inbox["learned"].labels else 0.0)
        weights = {b: dict(inbox[b].tensors) for b in BLOCKS}
        fit = client.train("fit", weights, BLOCKS, self.fit_loss, source, centroids=centroids, distill=distill)
        done = yield fit
        own = self.remembered(client, start, done.weights, codes, y)
        answer = reply(client, done.weights, BLOCKS, loss=done.loss)
        answer = with_replay(client, answer, fit.epochs, self.params.budget, source.replayed)
        return replace(answer, samples=source.real, private=own)

    def mixture(self, client: Client, inbox: Inbox, start: Weights, codes: Tensor, y: Tensor) -> Mixture:
        """Real images of current classes beside decoded ones of old classes, each with what the starting model makes
        of it: its code and its image. One pass over plain images, since a loss must not run a second network."""
        net = client.net
        own = torch.tensor(client.y_list)
        rows = among(own, inbox["centroids"].labels)
        real = unit(client.examples.inputs(client.current[client.tensor(rows)])[0])
        z, old = self.replayed(client, inbox, codes, y)
        x = torch.cat([real, decode(net, start, z)])
        code = encode(net, start, x)
        labels = client.tensor(torch.cat([own[rows], old]))
        made = {"x": x, "y": labels, "code": code, "image": decode(net, start, code)}
        return Mixture(made, len(rows), self.params.budget, old)

    def replayed(self, client: Client, inbox: Inbox, codes: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Codes to decode: the client's own, and for classes it has none of, draws around the centroid with the
        spread that loss and prior balance at, s² = 1/(1 + 2λ)."""
        absent = sorted(set(inbox["learned"].labels) - set(client.labels) - set(y.tolist()))
        labels = torch.tensor(absent, dtype=torch.long).repeat_interleave(self.params.budget)
        rng = torch.Generator().manual_seed(client.number("absent"))
        centres = table(inbox["centroids"], client.net.classes)[client.tensor(labels)]
        old = among(y, client.labels, False)
        drawn = around(centres, self.params.pull, rng)
        return torch.cat([codes[client.tensor(old)], drawn]), torch.cat([y[old], labels])

    def fit_loss(self, net: Net, batch: Batch) -> Tensor:
        """‖x − x̂‖² + KL + λ‖z − p_y‖² and the pull towards the starting model, a mean over an image's numbers. Real
        and decoded images, and the starting model's images of them, are all seen through the same views."""
        p, rng, (latent, decoder) = self.params, batch["rng"], halves(net)
        (views,) = net.weak((torch.cat([batch["x"], batch["image"]], 1),), rng)
        x, before = views.chunk(2, 1)
        mu, logvar = (t.float() for t in latent(net.base(x)))
        z = mu + (logvar / 2).exp() * torch.randn(mu.shape, generator=rng, device=mu.device)
        image = decoder(z).float()
        prior = (mu.square() + logvar.exp() - 1 - logvar).sum(1) / 2
        away = squares(z - batch["centroids"][batch["y"]])
        hold = squares(mu - batch["code"]) + squares(image - before)
        loss = p.rebuild * squares(x - image) + prior + p.pull * away + batch["distill"] * hold
        return loss.mean() / x[0].numel()

    def remembered(self, client: Client, start: Weights, weights: Weights, codes: Tensor, y: Tensor) -> Tensors:
        """The client's private state: its codes for the rest of this position, and those for later ones, up to B of a
        class, old ones re-encoded as f_new(g_old(m)), under the model it has just trained."""
        rng = torch.Generator().manual_seed(client.number("keep"))
        order = torch.randperm(len(client.current), generator=rng)
        labels = torch.cat([torch.tensor(client.y_list)[order], y])
        kept = torch.nonzero(first_of_each(labels, self.params.budget)).flatten()
        fresh = unit(client.examples.inputs(client.current[client.tensor(order)])[0])
        images = torch.cat([fresh, decode(client.net, start, codes)])[client.tensor(kept)]
        later = encode(client.net, weights, images)
        position = torch.tensor(client.when.position)
        own = {"codes": codes, "y": y, "later": later, "later_y": labels[kept], "position": position}
        return {k: client.keep(t) for k, t in own.items()}

    # -- centroids --------------------------------------------------------------------------------------------------

    def opens(self, state: ServerState, when: When) -> bool:
        return True  # a class may come with a client that takes part later only

    def survey_blocks(self, state: ServerState, when: When) -> Sequence[str]:
        return ("base", "latent", "centroids", *(STARTS if when.round else ()))  # before what they were is replaced

    def survey(self, client: Client, inbox: Inbox) -> Reply:
        """Mean codes of the classes that have no centroid yet."""
        own = torch.tensor(client.y_list)
        rows = among(own, inbox["centroids"].labels, False)
        latent = inbox["latent"].tensors
        if not len(rows):
            return Reply(client.id, len(client.current))
        features = client.features(inbox["base"])[client.tensor(rows)]
        mu = F.linear(features, latent["mu.weight"], latent["mu.bias"])
        return Reply(client.id, len(client.current), {"means": mean_codes(mu, own[rows])})

    def absorb(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        means = [r.blocks["means"] for r in replies if "means" in r.blocks]
        if STARTS[0] not in state.blocks and state.blocks["learned"].labels:
            state = state.also(**dict(zip(STARTS, BLOCKS, strict=True)))
        return state.put(means=pooled(means)) if means else state

    def trains(self, when: When) -> bool:
        return when.stage == "refresh"

    def train_server(self, server: Server, state: ServerState) -> ServerState:
        """New centroids descend the potential from their classes' mean codes; old ones stay where they are."""
        if "means" not in state.blocks:
            return state
        rng = torch.Generator().manual_seed(server.number("centroids"))
        placed = place(state.blocks["centroids"], state.blocks["means"], self.params.sigma, rng)
        return state.drop("means").put(centroids=placed)

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        return super().aggregate(state, [r for r in replies if r.blocks], when)

    def end_position(self, state: ServerState, when: When) -> ServerState:
        return state.drop(*STARTS).put(learned=Block("prototype", {}, state.blocks["centroids"].labels))

    # -- what comes of it -------------------------------------------------------------------------------------------

    def scores(self, net: Net, state: ServerState, features: Tensor) -> Tensor:
        return closeness(halves(net)[0].mu(features), state.blocks["centroids"], net.classes)

    def memories(self, net: Net, state: ServerState) -> dict[str, tuple[Block, Callable[[Tensor], Tensor]]]:
        return {"centroids": (state.blocks["centroids"], halves(net)[0].mu)}

    def replay(
        self, net: Net, state: ServerState, clients: Sequence[Client], label: int, count: int, rng: torch.Generator
    ) -> Samples | None:
        """Decoded codes of those who have some; where nobody has, decoded draws around the centroid."""
        if label not in state.blocks["learned"].labels or not self.params.budget:
            return None
        centroid = table(state.blocks["centroids"], net.classes)[label]
        stored = [c.private["later"][c.private["later_y"] == label] for c in clients if c.private]
        codes = torch.cat([centroid[None][:0], *stored])
        codes = codes[torch.randperm(len(codes), generator=rng, device=rng.device)[:count].to(codes.device)]
        codes = codes if len(codes) else around(centroid.expand(count, -1), self.params.pull, rng)
        return Samples("inputs", (decode(net, {b: state.weights()[b] for b in BLOCKS}, codes),))


def squares(x: Tensor) -> Tensor:
    return x.flatten(1).square().sum(1)


def starting(inbox: Inbox) -> Weights:
    """The model that the position began with, f_old and g_old."""
    return {b: dict((inbox.get(start) or inbox[b]).tensors) for start, b in zip(STARTS, BLOCKS, strict=True)}


def hold(client: Client, start: Weights) -> None:
    """Meters the starting model, which the client needs beside the one that it trains."""
    for tensors in start.values():
        for tensor in tensors.values():
            client.keep(tensor)


def recalled(client: Client, inbox: Inbox) -> tuple[Tensor, Tensor]:
    """The client's codes as the starting model decodes them, and their labels, on the CPU."""
    own = client.private
    if not own:
        return inbox["centroids"].tensors["mean"][:0], torch.zeros(0, dtype=torch.long)
    later = int(own["position"]) < client.when.position
    codes, y = (own["later"], own["later_y"]) if later else (own["codes"], own["y"])
    return codes, y.cpu()


def among(y: Tensor, labels: Sequence[int], which: bool = True) -> Tensor:
    """The places of those that are of these classes, or of those that are not."""
    return torch.nonzero(torch.isin(y, torch.tensor(labels, dtype=y.dtype)) == which).flatten()


def first_of_each(y: Tensor, quota: int) -> Tensor:
    """Which rows are among the first `quota` of their class."""
    before = F.one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0]
    return before <= quota


METHOD = HR
