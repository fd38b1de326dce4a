"""Noise on what a client sends. It is added at the client, before anything leaves it.

    unit = "example"   each reply alone hides each of its examples, from the server, too
                       in training (`gradient_bound`) each step has noise, and the reply needs no more
    unit = "client"    each client adds its share of the noise: the sum over the clients of a round hides all data of
                       any of them from those who see the sum alone

With secure sums each client adds a share of the noise for both units, to its fixed-point numbers (`summed_noise`).

Noise is drawn from a secret number, the place in the stream and a digest of what it is added to. So the same reply,
sent again, has the same noise and reveals nothing more; two different replies have independent noise. In a simulation
the secret is the run's seed, in a deployment it is random and never leaves the client.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox, Reply, ServerState, When
from profcil.engine.phases import GradientNoise
from profcil.errors import Failure
from profcil.privacy import adaptive_bound
from profcil.privacy.accountant import epsilon_of, epsilon_of_steps
from profcil.privacy.settings import PrivacySettings
from profcil.privacy.sums import Sum, block_of_sums, sums_of
from profcil.randomness import generator


@dataclass(frozen=True)
class Protection:
    """How the replies of a run are protected."""

    settings: PrivacySettings
    multiplier: float  # the deviation of the noise of a reply, or of a sum of replies, in units of its sensitivity
    clients: int  # that answer in a round, as planned; each adds its share of the noise of a sum
    releases: float = math.inf  # that one example or client takes part in at most, as planned
    steps: int = 0  # of gradients with noise in a reply; 0 = the noise is on the reply

    @property
    def by_client(self) -> bool:
        return self.settings.unit == "client"

    @property
    def most_examples(self) -> int:
        """For how many examples the statistics of the protected unit count at most."""
        return self.settings.examples if self.by_client else 1

    def epsilon(self, releases: float) -> float:
        """ε after this many replies about one example or client."""
        s = self.settings
        if self.steps:
            steps = math.ceil(releases * self.steps)
            return epsilon_of_steps(self.multiplier, s.delta, steps, s.sampling)
        return epsilon_of(math.sqrt(releases) / self.multiplier, s.delta)

    def gradient_noise(self, secret: int) -> GradientNoise | None:
        """The noise on the gradients of a client with this secret number; None where replies have the noise."""
        s = self.settings
        return GradientNoise(s.gradient_bound, self.multiplier, s.sampling, secret) if self.steps else None

    def protect(self, reply: Reply, inbox: Inbox, when: When, examples: int, secret: int) -> Reply:
        """The reply as it may leave a client that has this many examples. Exact numbers besides the blocks (the number
        of examples, the notes) are removed."""
        bare = replace(reply, samples=min(1, reply.samples), notes={})
        if self.steps:
            return bare
        if self.settings.secure_sum:
            limited = self.limited_blocks(reply.blocks, inbox, examples)
            return replace(bare, blocks=limited, notes=self.said_of_bound(reply.blocks, inbox))
        model, statistics = self.split(reply.blocks)
        sums = {name: sums_of(name, block) for name, block in statistics.items()}
        parts = self.model_parts(bool(model)) + sum(part.share for found in sums.values() for part in found.values())
        if not parts:
            return bare
        bound = (inbox[adaptive_bound.NAME].tensors["bound"],) if adaptive_bound.NAME in inbox else ()
        address = (reply.client, when.stage, when.position, when.round, digest(reply.blocks), *map(float, bound))
        rng = generator(secret, "privacy", *address)
        scale = self.deviation(parts)
        blocks = {}
        for name, block in statistics.items():
            blocks[name] = self.noised_block(block, sums[name], scale, examples, rng)
        if model:
            blocks |= self.noised_update(model, inbox, scale, rng)
        said = self.said_of_bound(reply.blocks, inbox)
        deviation = scale * adaptive_bound.MOST / math.sqrt(adaptive_bound.SHARE)
        notes = {name: value + deviation * float(drawn(torch.zeros(()), rng)) for name, value in said.items()}
        return replace(bare, blocks=blocks, notes=notes)

    @property
    def adaptive(self) -> bool:
        """Whether the bound on model updates follows them."""
        return bool(self.settings.update_quantile)

    def model_parts(self, has_model: bool) -> float:
        """The share of the budget for a model update and for what is said of its bound, relative to other parts."""
        return float(has_model) * (1 + adaptive_bound.SHARE * self.adaptive)

    def said_of_bound(self, blocks: Mapping[str, Block], inbox: Inbox) -> dict[str, float]:
        """Whether the model update is within a bound that follows the updates: ½, or else −½. Without noise."""
        model, _ = self.split(blocks)
        if not model or not self.adaptive:
            return {}
        within = length_of(changes_of(model, inbox)) <= adaptive_bound.bound_of(inbox, self.settings)
        return {adaptive_bound.NOTE: adaptive_bound.MOST if within else -adaptive_bound.MOST}

    def with_bound(self, state: ServerState) -> ServerState:
        """The server's state with the first bound, if it has none and the bound follows the updates."""
        if not self.adaptive or adaptive_bound.NAME in state.blocks:
            return state
        return adaptive_bound.with_bound(state, self.settings.update_bound)

    def adapted(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """The server's state with the bound of the next round."""
        if adaptive_bound.NAME not in state.blocks:
            return state
        bound = adaptive_bound.bound_of(state.blocks, self.settings)
        return adaptive_bound.with_bound(
            state, adaptive_bound.next_bound(bound, replies, self.settings.update_quantile)
        )

    def split(self, blocks: Mapping[str, Block]) -> tuple[dict[str, Block], dict[str, Block]]:
        """The model blocks, and the statistics."""
        model = {name: block for name, block in blocks.items() if block.kind == "model"}
        if model and not self.by_client:
            raise Failure(
                "the reply has a model update, which noise for single examples does not protect; "
                "set privacy.unit = client"
            )
        return model, {name: block for name, block in blocks.items() if name not in model}

    def limited_blocks(self, blocks: Mapping[str, Block], inbox: Inbox, examples: int) -> dict[str, Block]:
        """The blocks without noise, but limited in what the unit adds to a sum, for the noise of a secure sum."""
        model, statistics = self.split(blocks)
        weight = self.weight(examples)
        limited = {name: weighted(block, weight) for name, block in statistics.items()}
        return limited | (self.changed_model(model, inbox) if model else {})

    def weight(self, examples: int) -> float:
        """The factor on the statistics of a client with so many examples."""
        return min(1.0, self.most_examples / max(1, examples)) if self.by_client else 1.0

    def deviation(self, parts: float) -> float:
        """The deviation of the noise on each of some parts of a reply, in units of what a part may change by."""
        share = 1 / math.sqrt(self.clients) if self.by_client else 1.0
        return self.multiplier * math.sqrt(parts) * share

    def noised_block(
        self, block: Block, sums: Mapping[str, Sum], scale: float, examples: int, rng: np.random.Generator
    ) -> Block:
        """A block of statistics with noise. For the unit client the sums count for a limited number of examples."""
        weight = self.weight(examples)
        deviations = {
            name: scale * self.most_examples * total.most / math.sqrt(total.share) for name, total in sums.items()
        }
        noised = {}
        for name, total in sums.items():
            noise = drawn(total.value, rng) * deviations[name] / total.weight
            noised[name] = total.value * weight + noise
        return block_of_sums(block, noised, deviations)

    def noised_update(
        self, model: Mapping[str, Block], inbox: Inbox, scale: float, rng: np.random.Generator
    ) -> dict[str, Block]:
        """Model blocks whose change is clipped and has noise."""
        deviation = scale * adaptive_bound.bound_of(inbox, self.settings)
        return self.changed_model(model, inbox, lambda t: drawn(t, rng) * deviation)

    def changed_model(
        self, model: Mapping[str, Block], inbox: Inbox, noise: Callable[[Tensor], Tensor] = torch.zeros_like
    ) -> dict[str, Block]:
        """Model blocks whose change is clipped, all together, and has the noise that a function draws for a tensor."""
        changes = changes_of(model, inbox)
        factor = min(1.0, adaptive_bound.bound_of(inbox, self.settings) / max(length_of(changes), 1e-30))
        blocks = {}
        for name, tensors in changes.items():
            before = inbox[name].tensors
            moved = {key: t * factor + noise(t) for key, t in tensors.items()}
            after = {key: (before[key].double() + t).to(before[key].dtype) for key, t in moved.items()}
            blocks[name] = replace(model[name], tensors=after)
        return blocks


def weighted(block: Block, weight: float) -> Block:
    """A block of statistics whose sums are multiplied by a weight."""
    if weight == 1.0:
        return block
    scaled = {name: block.tensors[name].double() * weight for name in ("count", "gram") if name in block.tensors}
    return replace(block, tensors={**block.tensors, **scaled})


def changes_of(model: Mapping[str, Block], inbox: Inbox) -> dict[str, dict[str, Tensor]]:
    """What a client has changed in its model blocks."""
    return {name: change_of(name, block, inbox) for name, block in model.items()}


def length_of(changes: Mapping[str, Mapping[str, Tensor]]) -> float:
    """The Euclidean norm of all changes together."""
    return float(torch.stack([t.norm() for tensors in changes.values() for t in tensors.values()]).norm())


def change_of(name: str, block: Block, inbox: Inbox) -> dict[str, Tensor]:
    """What a client has changed in a model block that it was sent, in float64."""
    if name not in inbox:
        raise Failure(f"the model block {name} was not sent to the client, so its update has no length to clip")
    before = inbox[name].tensors
    return {key: tensor.double() - before[key].double() for key, tensor in block.tensors.items()}


def drawn(like: Tensor, rng: np.random.Generator) -> Tensor:
    """Standard normal numbers of the shape of a tensor, the same on every device. numpy draws them: torch's generator
    on a CPU uses 32 bits of its seed alone, so few that somebody could try them all and take the noise off."""
    return torch.from_numpy(np.asarray(rng.standard_normal(tuple(like.shape)))).to(like.device)


def digest(blocks: Mapping[str, Block]) -> str:
    """A digest of the tensors of some blocks."""
    total = hashlib.blake2b(digest_size=16)
    for name, block in blocks.items():
        total.update(f"{name} {block.labels}".encode())
        for tensor in block.tensors.values():
            total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
