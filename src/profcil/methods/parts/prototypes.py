"""Class prototypes: one or several mean features a class, reported by clients with counts, kept by the server without.

The bank only ever grows: a class that nobody reports in a round keeps the prototypes it has. Public implementations
rebuild the bank from each round's reporters, and so lose every class that is away for a round.

Rows follow `labels`, ascending class ids; a class with several prototypes has as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from profcil.engine.payload import Block
from profcil.tensors import to_device

LLOYD = 10  # steps of k-means


def no_prototypes(like: Tensor) -> Block:
    """An empty bank for features of the length of `like`, on its device."""
    return Block("prototype", {"mean": like.new_zeros(0, len(like))})


def report(z: Tensor, y: Sequence[int], count: int = 1) -> Block:
    """What a client sends of each class it holds: up to `count` centres of its features, and how many are at each. `y`
    are the labels of the features."""
    labels = sorted(set(y))
    rows = [torch.tensor([i for i, other in enumerate(y) if other == label]) for label in labels]
    own = [z[to_device(index, z.device)] for index in rows]
    found = [centres(points, points.new_ones(len(points)), count) for points in own]
    tensors = {"mean": torch.cat([c for c, _ in found]).float(), "count": torch.cat([n for _, n in found]).int()}
    return Block("prototype", tensors, repeated(labels, [len(c) for c, _ in found]))


def centres(points: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Weighted k-means from a fixed start: the point nearest to the mean, then always the farthest from those chosen.
    One centre is the mean. Centres that attract nothing are left out. In float64, with the weight at each centre."""
    points, weight = points.double(), weight.double()
    middle = (weight @ points / weight.sum())[None]
    chosen = [torch.cdist(middle, points).argmin()]
    while len(chosen) < min(count, len(points)):
        chosen.append(torch.cdist(points, points[torch.stack(chosen)]).amin(1).argmax())
    found, mass = points[torch.stack(chosen)], weight.sum()[None]
    for _ in range(LLOYD if count > 1 else 1):
        nearest = torch.cdist(points, found).argmin(1)
        share = one_hot(nearest, len(found)).double().T * weight
        found, mass = share @ points, share.sum(1)
        if count > 1:  # a single one attracts all; to find those that attract nothing is to wait for a GPU
            found, mass = found[mass > 0], mass[mass > 0]
        found = found / mass[:, None]
    return found, mass


def merge(bank: Block, reports: Sequence[Block], share: float = 1.0, count: int = 1) -> Block:
    """The bank after some reports: of a reported class, prototypes move by `share` towards what was reported nearest
    to them; a new class takes up to `count` centres of its reports, and every other class stays to the bit."""
    points, weight = (torch.cat([r.tensors[k] for r in reports]).double() for k in ("mean", "count"))
    of = [y for r in reports for y in r.labels]
    rows = {label: rows_of(bank, label) for label in set(bank.labels)}
    for label in set(of):
        index = to_device(torch.tensor([i for i, y in enumerate(of) if y == label]), points.device)
        rows[label] = moved(rows.get(label), points[index], weight[index], share, count)
    labels = sorted(rows)
    mean = torch.cat([rows[y] for y in labels])
    return Block("prototype", {"mean": mean}, repeated(labels, [len(rows[y]) for y in labels]))


def moved(old: Tensor | None, points: Tensor, weight: Tensor, share: float, count: int) -> Tensor:
    """A class's prototypes after a report of these points. Which prototype a point belongs to is decided with the
    common mean removed from both sides, since features drift as a whole; one without points follows that drift."""
    if old is None or len(old) < min(count, len(points)):
        return centres(points, weight, count)[0].float()
    here, there = old.double().mean(0), weight @ points / weight.sum()
    part = one_hot(torch.cdist(points - there, old - here).argmin(1), len(old)).double().T * weight
    mass = part.sum(1, keepdim=True)
    goal = torch.where(mass > 0, part @ points / mass.clamp(min=1), old - here + there)
    return torch.lerp(old, goal.float(), share)


def table(bank: Block, classes: int) -> tuple[Tensor, Tensor]:
    """The bank as one row a class id, and which rows are known: what a loss can look labels up in."""
    rows, known = tables(bank, classes, 1)
    return rows[:, 0], known


def tables(bank: Block, classes: int, count: int) -> tuple[Tensor, Tensor]:
    """The same with `count` rows a class, [class ids, count, d]; a class with fewer prototypes has them repeated."""
    mean = bank.tensors["mean"]
    rows = mean.new_zeros(classes, count, mean.shape[1])
    for label in set(bank.labels):
        own = rows_of(bank, label)
        rows[label] = own.repeat(-(-count // len(own)), 1)[:count]
    known = torch.isin(torch.arange(classes), torch.tensor(bank.labels, dtype=torch.long))
    return rows, to_device(known, mean.device)


def rows_of(bank: Block, label: int) -> Tensor:
    """The prototypes of one class that has some."""
    start = bank.labels.index(label)
    return bank.tensors["mean"][start : start + bank.labels.count(label)]


def class_means(bank: Block) -> Block:
    """The bank with one row a class, the mean of its prototypes."""
    labels = tuple(sorted(set(bank.labels)))
    rows = [rows_of(bank, y).mean(0) for y in labels]
    return Block("prototype", {"mean": torch.stack(rows) if rows else bank.tensors["mean"]}, labels)


def repeated(labels: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(y for y, n in zip(labels, counts, strict=True) for _ in range(n))
