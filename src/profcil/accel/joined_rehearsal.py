"""Class-balanced rehearsal of several clients at once, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from profcil.data.bundle import to_device
from profcil.memory.rehearsal import Rehearsal, correlate_


class JoinedRehearsal:
    """The epochs of several clients at once. On a GPU, launching the small kernels of two shuffles and a draw client by
    client takes longer than an epoch of steps. What a client draws does not depend on the others.

    All features lie in one pool: first the real ones of all clients, then their pseudo-features. A client's epoch is a
    row of indices into the pool.
    """

    def __init__(self, sources: Sequence[Rehearsal], batch: int) -> None:
        self.sources = sources
        self.batch = batch
        real = [s.real for s in sources]
        sizes = [s.size for s in sources]
        self.steps = [ceil(size / batch) for size in sizes]
        own = [len(r.labels) for r in real]
        pseudo = [size - n for size, n in zip(sizes, own, strict=True)]
        offsets, starts = self._make_pool(pseudo)
        device = self.pool.device
        columns = torch.tensor([offsets, sizes, own, starts])[:, :, None]
        self.offset, size, n, start = to_device(columns, device)
        self.classes = padded([r.y.double() for r in real], torch.inf)
        self.places = padded([r.places for r in real], 0)
        place = torch.arange(max(sizes), device=device)
        self.is_real = place < n
        self.remembered = place - n + start
        self.y = padded([s.y for s in sources], 0)
        slots = max(self.steps) * batch
        self.slots = torch.arange(slots, device=device) % size
        self.by_class = torch.zeros_like(self.classes)
        self.by_turn = torch.full(self.y.shape, 2.0, device=device)

    def _make_pool(self, pseudo: list[int]) -> tuple[list[int], list[int]]:
        """Makes the pool, with space for this many pseudo-features of each client. Returns where the real features of
        each client begin, and where its pseudo-features do."""
        features = [s.features for s in self.sources]
        lengths = [len(f) for f in features]
        *offsets, end_of_real = accumulate(lengths, initial=0)
        *starts, _ = accumulate(pseudo, initial=end_of_real)
        width = features[0].shape[1]
        space = features[0].new_empty(sum(pseudo), width)
        self.pool = torch.cat([*features, space])
        means = torch.cat([s.mean for s in self.sources])
        spreads = torch.cat([s.spread for s in self.sources])
        self.mean = means[:, None]
        self.spread = spreads[:, None]
        drawn = self.pool[end_of_real:]
        quota = self.sources[0].quota
        self.drawn = drawn.view(len(self.mean), quota, width)
        self.noises = drawn.split(pseudo)
        return offsets, starts

    def epoch(self, rngs: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """[clients, steps, batch, …]; clients with fewer steps wrap around."""
        for row, (source, rng) in enumerate(zip(self.sources, rngs, strict=True)):
            self.by_class[row, : len(source.real.y)].uniform_(generator=rng)
            noise = self.noises[row].normal_(generator=rng)
            correlate_(noise, source.factor)
            self.by_turn[row, : source.size].uniform_(generator=rng)
        scale = self.sources[0].noise
        torch.addcmul(self.mean, self.spread, self.drawn, value=scale, out=self.drawn)
        shuffled = (self.classes + self.by_class).argsort(1)
        rows = shuffled.gather(1, self.places) + self.offset
        missing = self.is_real.shape[1] - rows.shape[1]
        real_rows = F.pad(rows, (0, missing))
        where = torch.where(self.is_real, real_rows, self.remembered)
        turn = self.by_turn.argsort(1).gather(1, self.slots)
        shape = (len(self.sources), -1, self.batch)
        chosen = where.gather(1, turn).flatten()
        u = self.pool.index_select(0, chosen)
        y = self.y.gather(1, turn)
        return {"u": u.view(*shape, u.shape[1]), "y": y.view(shape)}


def padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
