"""Class-balanced rehearsal: real features of the current classes beside pseudo-features of remembered ones.

One epoch holds the same number of features of every class: drawn from the real ones without replacement as long as
they last, or sampled as ũ = μ + γ σ ⊙ ε. A uniform draw from an epoch is therefore an unbiased sample of the balanced
objective (1/|Y|) Σ_y E_{u∼q_y}, which is what the paper's balanced-gradient lemma asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from profcil.accel.cpu.normal import normal_
from profcil.memory.bank import Bank
from profcil.tensors import onto


def pseudo(
    mean: Tensor, spread: Tensor, quota: int, noise: float, rng: torch.Generator, out: Tensor | None = None
) -> Tensor:
    """`quota` pseudo-features of each class, [classes · quota, d], classes in order; made in `out`, where given."""
    k, d = mean.shape
    drawn = normal_((mean.new_empty(k * quota, d) if out is None else out).view(k, quota, d), rng)
    return torch.addcmul(mean[:, None], spread[:, None], drawn, value=noise, out=drawn).view(k * quota, d)


class Balanced:
    """Draws the same number of examples of each class, again and again. What does not change between draws is worked
    out once: counting classes has to wait for the device."""

    def __init__(self, y: Tensor, quota: int, device: torch.device | None = None) -> None:
        """Draws on `device`, by default where `y` is; from the host a GPU need not be waited for."""
        self.classes, count = torch.unique(y, return_counts=True)
        start = torch.cumsum(count, 0) - count
        turn = torch.arange(quota, device=y.device)
        places = (start[:, None] + turn % count[:, None]).flatten()  # wrapping around where a class has fewer
        labels = self.classes.repeat_interleave(quota)  # of what is drawn
        self.y, self.places, self.labels = (onto(t, device or y.device) for t in (y, places, labels))

    def draw(self, rng: torch.Generator) -> Tensor:
        """Row numbers, classes in order; each class in a fresh shuffle."""
        shuffled = torch.randperm(len(self.y), generator=rng, device=self.y.device)
        by_class = torch.sort(self.y.index_select(0, shuffled), stable=True).indices
        return shuffled.index_select(0, by_class.index_select(0, self.places))


class Roll:
    """Whose features an epoch holds: so many of every class in `y`, then of every other class that is remembered."""

    def __init__(self, y: Tensor, remembered: Sequence[int], quota: int, device: torch.device | None = None) -> None:
        self.quota, self.real = quota, Balanced(y, quota, device)
        current = set(self.real.classes.tolist())
        rows = [i for i, label in enumerate(remembered) if label not in current]
        told = torch.tensor([rows, [remembered[i] for i in rows]], dtype=torch.long)
        self.rows, labels = onto(told, self.real.labels.device)
        self.y = torch.cat([self.real.labels, labels.repeat_interleave(quota)])


class Rehearsal:
    """The balanced pseudo multi-task set of one client: a batch source for the engine (Eq. 'pro-loss')."""

    def __init__(self, features: Tensor, roll: Roll, bank: Bank | None, *, noise: float) -> None:
        self.features, self.roll, self.noise = features, roll, noise
        self.mean = bank.mean[roll.rows] if bank else features[:0]
        self.spread = bank.spread[roll.rows] if bank else features[:0]
        self.size = len(roll.y)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        real = self.roll.real
        u, n = self.features.new_empty(self.size, self.features.shape[1]), len(real.labels)
        torch.index_select(self.features, 0, real.draw(rng), out=u[:n])
        pseudo(self.mean, self.spread, self.roll.quota, self.noise, rng, out=u[n:])
        return {"u": u, "y": self.roll.y}

    @classmethod
    def together(cls, sources: Sequence[Rehearsal], batch: int) -> Together:
        """The same for several clients, shuffled and cut into batches."""
        return Together(sources, batch)


class Together:
    """Epochs of several clients at once: on a GPU, client by client, to start the many small operations of two shuffles
    and a draw takes longer than a whole epoch of steps. A client draws the same numbers whoever is beside it.

    The epoch of client i is a row of numbers that say where in the pool its features lie: first all clients' real ones,
    then their pseudo-features.
    """

    def __init__(self, sources: Sequence[Rehearsal], batch: int) -> None:
        device, real = sources[0].features.device, [s.roll.real for s in sources]
        sizes, own = [s.size for s in sources], [len(r.labels) for r in real]
        self.sources, self.batch, self.steps = sources, batch, [-(-size // batch) for size in sizes]
        pseudo = [size - n for size, n in zip(sizes, own, strict=True)]
        features = [s.features for s in sources]
        offsets = list(accumulate((len(f) for f in features), initial=0))
        starts = list(accumulate(pseudo, initial=offsets.pop()))
        self.pool = torch.cat([*features, features[0].new_empty(sum(pseudo), features[0].shape[1])])
        self.mean, self.spread = (torch.cat([getattr(s, k) for s in sources])[:, None] for k in ("mean", "spread"))
        drawn = self.pool[starts[0] :]
        self.drawn, self.noises = drawn.view(len(self.mean), sources[0].roll.quota, drawn.shape[1]), drawn.split(pseudo)
        self.offset, size, n, start = onto(torch.tensor([offsets, sizes, own, starts[:-1]])[:, :, None], device)
        self.classes = padded([r.y.double() for r in real], torch.inf)
        self.places = padded([r.places for r in real], 0)
        place = torch.arange(max(sizes), device=device)
        self.is_real, self.remembered = place < n, place - n + start
        self.y = padded([s.roll.y for s in sources], 0)
        self.slots = torch.arange(max(self.steps) * batch, device=device) % size
        self.by_class, self.by_turn = torch.zeros_like(self.classes), torch.full(self.y.shape, 2.0, device=device)

    def epoch(self, rngs: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """[clients, steps, batch, …]; whoever has fewer steps wraps around."""
        for row, (source, rng) in enumerate(zip(self.sources, rngs, strict=True)):
            self.by_class[row, : len(source.roll.real.y)].uniform_(generator=rng)
            self.noises[row].normal_(generator=rng)
            self.by_turn[row, : source.size].uniform_(generator=rng)
        torch.addcmul(self.mean, self.spread, self.drawn, value=self.sources[0].noise, out=self.drawn)
        rows = (self.classes + self.by_class).argsort(1).gather(1, self.places) + self.offset
        width = self.is_real.shape[1] - rows.shape[1]
        where = torch.where(self.is_real, F.pad(rows, (0, width)), self.remembered)
        turn = self.by_turn.argsort(1).gather(1, self.slots)
        shape = (len(self.sources), -1, self.batch)
        u = self.pool.index_select(0, where.gather(1, turn).flatten())
        return {"u": u.view(*shape, u.shape[1]), "y": self.y.gather(1, turn).view(shape)}


def padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
