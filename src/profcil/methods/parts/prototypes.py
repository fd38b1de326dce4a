"""Class prototypes: one or several mean features per class. Clients report them with counts, the server stores them.

A class that no client reports in a round keeps its prototypes. Public implementations rebuild the bank from the reports
of each round, and so lose every class that is absent in one round.

Rows follow `labels`, ascending class ids; a class with several prototypes has several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from profcil.engine.channel import Block

LLOYD = 10  # steps of k-means


def no_prototypes(like: Tensor) -> Block:
    """An empty bank for features of the length and device of `like`."""
    mean = like.new_zeros(0, len(like))
    return Block("prototype", {"mean": mean})


def report(z: Tensor, y: Sequence[int], count: int = 1) -> Block:
    """What a client sends: for each class up to `count` centres of its features, and the number of features at each.
    `y` are the labels of the features."""
    labels = sorted(set(y))
    means = []
    counts = []
    for label in labels:
        points = z[rows_with(label, y, z.device)]
        found, mass = centres(points, points.new_ones(len(points)), count)
        means.append(found)
        counts.append(mass)
    tensors = {"mean": torch.cat(means).float(), "count": torch.cat(counts).int()}
    numbers = [len(rows) for rows in means]
    return Block("prototype", tensors, repeat_labels(labels, numbers))


def rows_with(label: int, y: Sequence[int], device: torch.device) -> Tensor:
    """The rows that have this label, as an index on a device."""
    rows = [row for row, other in enumerate(y) if other == label]
    return torch.tensor(rows, device=device)


def centres(points: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Centres of weighted k-means and the weight at each, in float64. A single centre is the mean.

    The start is deterministic: the point nearest to the mean, then always the point farthest from those chosen. Centres
    without points are left out.
    """
    points = points.double()
    weight = weight.double()
    mean = weight @ points / weight.sum()
    chosen = [torch.cdist(mean[None], points).argmin()]
    while len(chosen) < min(count, len(points)):
        found = points[torch.stack(chosen)]
        distance = torch.cdist(points, found).amin(1)
        chosen.append(distance.argmax())
    found = points[torch.stack(chosen)]
    mass = weight.sum()[None]
    for _ in range(LLOYD if count > 1 else 1):
        nearest = torch.cdist(points, found).argmin(1)
        member = one_hot(nearest, len(found)).double().T
        share = member * weight
        found = share @ points
        mass = share.sum(1)
        if count > 1:  # a single centre always has points
            found = found[mass > 0]
            mass = mass[mass > 0]
        found = found / mass[:, None]
    return found, mass


def merge(bank: Block, reports: Sequence[Block], share: float = 1.0, count: int = 1) -> Block:
    """The bank after some reports. Prototypes of a reported class move by `share` towards the reported centres nearest
    to them. A new class gets up to `count` centres of its reports. All other classes stay, to the bit."""
    points = torch.cat([r.tensors["mean"] for r in reports]).double()
    weight = torch.cat([r.tensors["count"] for r in reports]).double()
    reported = [y for r in reports for y in r.labels]
    rows = {label: rows_of(bank, label) for label in set(bank.labels)}
    for label in set(reported):
        index = rows_with(label, reported, points.device)
        old = rows.get(label)
        rows[label] = move_prototypes(old, points[index], weight[index], share, count)
    labels = sorted(rows)
    mean = torch.cat([rows[y] for y in labels])
    counts = [len(rows[y]) for y in labels]
    return Block("prototype", {"mean": mean}, repeat_labels(labels, counts))


def move_prototypes(old: Tensor | None, points: Tensor, weight: Tensor, share: float, count: int) -> Tensor:
    """The prototypes of one class after a report of these points.

    Points are assigned to the nearest prototype after the mean of each side is subtracted, because features drift as a
    whole. A prototype without points follows the drift of the mean.
    """
    if old is None or len(old) < min(count, len(points)):
        return centres(points, weight, count)[0].float()
    old_mean = old.double().mean(0)
    new_mean = weight @ points / weight.sum()
    nearest = torch.cdist(points - new_mean, old - old_mean).argmin(1)
    member = one_hot(nearest, len(old)).double().T
    assigned = member * weight
    mass = assigned.sum(1, keepdim=True)
    assigned_mean = assigned @ points / mass.clamp(min=1)
    drifted = old - old_mean + new_mean
    goal = torch.where(mass > 0, assigned_mean, drifted)
    return torch.lerp(old, goal.float(), share)


def tables(bank: Block, classes: int, count: int) -> tuple[Tensor, Tensor]:
    """The bank as a table indexed by class id, [classes, count, d], and a mask of the classes that have prototypes. If
    a class has fewer than `count`, they are repeated."""
    mean = bank.tensors["mean"]
    rows = mean.new_zeros(classes, count, mean.shape[1])
    for label in set(bank.labels):
        own = rows_of(bank, label)
        repeats = ceil(count / len(own))
        rows[label] = own.repeat(repeats, 1)[:count]
    labels = torch.tensor(bank.labels, dtype=torch.long)
    known = torch.isin(torch.arange(classes), labels)
    return rows, known.to(mean.device)


def rows_of(bank: Block, label: int) -> Tensor:
    """The prototypes of a class in the bank."""
    start = bank.labels.index(label)
    stop = start + bank.labels.count(label)
    return bank.tensors["mean"][start:stop]


def class_means(bank: Block) -> Block:
    """The bank with one row per class, the mean of its prototypes."""
    labels = tuple(sorted(set(bank.labels)))
    rows = [rows_of(bank, y).mean(0) for y in labels]
    mean = torch.stack(rows) if rows else bank.tensors["mean"]
    return Block("prototype", {"mean": mean}, labels)


def repeat_labels(labels: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Each label as often as its count."""
    repeated: list[int] = []
    for label, count in zip(labels, counts, strict=True):
        repeated += [label] * count
    return tuple(repeated)
