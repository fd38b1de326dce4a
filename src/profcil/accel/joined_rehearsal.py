"""Class-balanced rehearsal of several clients at once, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from profcil.memory.rehearsal import Rehearsal, correlate_
from profcil.tensors import to_device


class JoinedRehearsal:
    """The epochs of several clients at once. On a GPU, launching the small kernels of two shuffles and a draw client by
    client takes longer than an epoch of steps. What a client draws does not depend on the others.

    All features lie in one pool: first the real ones of all clients, then their pseudo-features. A client's epoch is a
    row of indices into the pool.
    """

    def __init__(self, sources: Sequence[Rehearsal], batch: int) -> None:
        device, real = sources[0].features.device, [s.real for s in sources]
        sizes, own = [s.size for s in sources], [len(r.labels) for r in real]
        self.sources, self.batch, self.steps = sources, batch, [-(-size // batch) for size in sizes]
        pseudo = [size - n for size, n in zip(sizes, own, strict=True)]
        features = [s.features for s in sources]
        offsets = list(accumulate((len(f) for f in features), initial=0))
        starts = list(accumulate(pseudo, initial=offsets.pop()))
        self.pool = torch.cat([*features, features[0].new_empty(sum(pseudo), features[0].shape[1])])
        self.mean, self.spread = (torch.cat([getattr(s, k) for s in sources])[:, None] for k in ("mean", "spread"))
        drawn = self.pool[starts[0] :]
        self.drawn, self.noises = drawn.view(len(self.mean), sources[0].quota, drawn.shape[1]), drawn.split(pseudo)
        self.offset, size, n, start = to_device(torch.tensor([offsets, sizes, own, starts[:-1]])[:, :, None], device)
        self.classes = padded([r.y.double() for r in real], torch.inf)
        self.places = padded([r.places for r in real], 0)
        place = torch.arange(max(sizes), device=device)
        self.is_real, self.remembered = place < n, place - n + start
        self.y = padded([s.y for s in sources], 0)
        self.slots = torch.arange(max(self.steps) * batch, device=device) % size
        self.by_class, self.by_turn = torch.zeros_like(self.classes), torch.full(self.y.shape, 2.0, device=device)

    def epoch(self, rngs: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """[clients, steps, batch, …]; clients with fewer steps wrap around."""
        for row, (source, rng) in enumerate(zip(self.sources, rngs, strict=True)):
            self.by_class[row, : len(source.real.y)].uniform_(generator=rng)
            correlate_(self.noises[row].normal_(generator=rng), source.factor)
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
