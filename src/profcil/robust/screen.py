"""Finds replies that lie out of the range of all others in a round, by stated rules.

A model is out of range if its distance from the broadcast one is more than `FAR` times the median of the others and
more than `OWN_LENGTH` of the broadcast model's length.

A row of class statistics is compared with the rows that other clients sent in this round and those that the server
stores; there must be three, or one that is stored. It is out of range if

- it is `FAR` times as long as they are, or
- it is `FAR` times as far from their centre as they are, and further than they are long; for this they must come from
  two clients or from the memory, and be means or the like: shifts of different clients may point anywhere; or
- it lies where another class is: less than half as far from it as from its own, and no further than rows of one class
  usually are.

Sums without rows, e.g. a matrix, are out of range if they are `FAR` times as large as the median of three others, per
example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox, Reply
from profcil.robust.rules import FEWEST, distance, median

FAR = 3.0  # honest clients stay below it, or near what is usual in absolute terms
OWN_LENGTH = 0.5  # honest clients move a model by a few hundredths of its length
STORED = -1  # the owner of rows that the server stores
BY_CLASS = ("statistics", "prototype")  # kinds of blocks whose rows differ by class
COMPARED = (*BY_CLASS, "transport")


def out_of_range(replies: Sequence[Reply], inboxes: Mapping[int, Inbox], stored: Mapping[str, Block]) -> dict[int, str]:
    """The clients whose replies are out of range, each with the first reason. Labels are compared last, without the
    rows of clients that are far away: next to these an honest row would look misplaced."""
    found = dict(far_models(replies, inboxes))
    for name, tensor in tables(replies):
        senders = [reply for reply in replies if name in reply.blocks]
        if senders[0].blocks[name].labels:
            found = dict(far_rows(name, tensor, senders, stored)) | found
        else:
            found = dict(large_sums(name, tensor, senders)) | found
    rest = [reply for reply in replies if reply.client not in found]
    for name, tensor in tables(rest):
        senders = [reply for reply in rest if name in reply.blocks]
        if senders[0].blocks[name].kind in BY_CLASS and senders[0].blocks[name].labels:
            found = dict(mislabelled_rows(name, tensor, senders, stored)) | found
    return found


def tables(replies: Sequence[Reply]) -> list[tuple[str, str]]:
    """The names of all blocks of statistics, each with the names of its tensors."""
    blocks = {name: block for reply in replies for name, block in reply.blocks.items() if block.kind in COMPARED}
    return [(name, tensor) for name, block in blocks.items() for tensor in block.tensors]


# -- models ------------------------------------------------------------------------------------------------------------


def far_models(replies: Sequence[Reply], inboxes: Mapping[int, Inbox]) -> Iterator[tuple[int, str]]:
    """Models that are too far from the broadcast one."""
    moved = {}
    for reply in replies:
        apart, length = model_distance(reply, inboxes[reply.client])
        if length:
            moved[reply.client] = (apart, length)
    for client, (apart, length) in moved.items():
        others = [d for c, (d, _) in moved.items() if c != client]
        if others and apart > FAR * middle(others) and apart > OWN_LENGTH * length:
            times = apart / max(middle(others), 1e-30)
            yield client, f"its model moved {times:.3g} times as far as the median of the others"


def model_distance(reply: Reply, inbox: Inbox) -> tuple[float, float]:
    """The distance of a reply's model blocks from the broadcast ones, and the length of these."""
    names = [name for name, block in reply.blocks.items() if block.kind == "model" and name in inbox]
    sent = [inbox[name].tensors for name in names]
    apart = [distance(reply.blocks[name].tensors, tensors) for name, tensors in zip(names, sent, strict=True)]
    lengths = [float(t.double().norm()) for tensors in sent for t in tensors.values()]
    return math.hypot(*apart), math.hypot(*lengths)


# -- rows by class -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportedRows:
    """Rows of one tensor, from all clients and from the server."""

    values: Tensor  # [n, d], float64
    owner: Tensor  # [n], the client, or STORED
    label: Tensor  # [n]


def far_rows(
    name: str, tensor: str, senders: Sequence[Reply], stored: Mapping[str, Block]
) -> Iterator[tuple[int, str]]:
    """Clients with rows that are too far from all others."""
    rows = gather_rows(name, tensor, senders, stored)
    if rows is None:
        return
    for reply in senders:
        own = rows.values[rows.owner == reply.client]
        others = without(rows, reply.client)
        if not len(own) or not (len(others.values) >= FEWEST or has_memory(others)):
            continue
        several = has_memory(others) or len(others.owner.unique()) > 1
        is_far = several and reply.blocks[name].kind in BY_CLASS and far_from_centre(own, others.values)
        if is_far or too_long(own, others.values):
            yield reply.client, f"block {name}: {tensor} is far from what all others sent"


def mislabelled_rows(
    name: str, tensor: str, senders: Sequence[Reply], stored: Mapping[str, Block]
) -> Iterator[tuple[int, str]]:
    """Clients with rows that lie where another class is."""
    rows = gather_rows(name, tensor, senders, stored)
    for client in mislabelled(rows) if rows else ():
        yield client, f"block {name}: {tensor} of a class is as others sent it of another class"


def gather_rows(name: str, tensor: str, senders: Sequence[Reply], stored: Mapping[str, Block]) -> ReportedRows | None:
    """All rows of a tensor by class; None where it has no rows of real numbers."""
    values: list[Tensor] = []
    owner: list[int] = []
    label: list[int] = []
    blocks = [(reply.client, reply.blocks[name]) for reply in senders]
    blocks += [(STORED, block) for block in stored.values() if block.labels and block.kind == "memory"]
    width = senders[0].blocks[name].tensors[tensor].shape[1:]
    for client, block in blocks:
        part = block.tensors.get(tensor)
        if part is None or part.dim() != 2 or not part.is_floating_point() or part.shape[1:] != width:
            continue
        values.append(part.double())
        owner += [client] * len(part)
        label += block.labels
    if not values or not values[0].shape[1]:
        return None
    device = values[0].device
    return ReportedRows(torch.cat(values), torch.tensor(owner, device=device), torch.tensor(label, device=device))


def has_memory(rows: ReportedRows) -> bool:
    """Whether some rows are the server's memory. One of them may stand for many clients."""
    return bool((rows.owner == STORED).any())


def too_long(own: Tensor, others: Tensor) -> bool:
    """Whether a row is longer than the others are."""
    return bool((own.norm(dim=1) > FAR * median(others.norm(dim=1))).any())


def far_from_centre(own: Tensor, others: Tensor) -> bool:
    """Whether a row is further from the centre of the others than they are, and further than they are long."""
    centre = median(others)
    usual = median((others - centre).norm(dim=1))
    length = median(others.norm(dim=1))
    apart = (own - centre).norm(dim=1)
    return bool(((apart > FAR * usual) & (apart > length)).any())


def mislabelled(rows: ReportedRows) -> list[int]:
    """The clients whose rows lie where another class is. One false row also makes the rows of honest clients look
    misplaced; so the client is taken without which the fewest rows are, again and again. Where two clients contradict
    each other and no other client has such rows, neither is taken."""
    found: list[int] = []
    to_own, _ = class_distances(rows)
    known = to_own[~to_own.isnan()]
    if len(known) < FEWEST:
        return found
    usual = float(known.quantile(0.25))  # low, because a false row makes an honest one seem far from its class
    while True:
        left = {c: len(misplaced(without(rows, c), usual)) for c in misplaced(rows, usual) if c != STORED}
        culprits = [c for c in left if left[c] == min(left.values())]
        if len(culprits) != 1:
            return found
        found.append(culprits[0])
        rows = without(rows, culprits[0])


def misplaced(rows: ReportedRows, usual: float) -> list[int]:
    """The owners of rows that are less than half as far from another class as from their own, and no further from it
    than rows of one class usually are."""
    to_own, to_other = class_distances(rows)
    strange = (to_other < to_own / 2) & (to_other <= 2 * usual)  # nan compares as false
    return [int(owner) for owner in rows.owner[strange].unique()]


def class_distances(rows: ReportedRows) -> tuple[Tensor, Tensor]:
    """The distance of each row from its class, nan if no other client sent it, and from the nearest other class. The
    distance from a class is the median over its rows from other owners."""
    gap = torch.cdist(rows.values, rows.values).masked_fill(rows.owner[:, None] == rows.owner, torch.nan)
    classes = rows.label.unique()
    to_class = torch.stack([gap[:, rows.label == y].nanmedian(1).values for y in classes], 1)
    is_own = rows.label[:, None] == classes
    to_other = to_class.masked_fill(is_own, torch.inf).nan_to_num(torch.inf).amin(1)
    return to_class[is_own], to_other


def without(rows: ReportedRows, client: int) -> ReportedRows:
    """The rows of all others."""
    kept = rows.owner != client
    return ReportedRows(rows.values[kept], rows.owner[kept], rows.label[kept])


# -- sums without rows -------------------------------------------------------------------------------------------------


def large_sums(name: str, tensor: str, senders: Sequence[Reply]) -> Iterator[tuple[int, str]]:
    """Clients whose sums are too large for the number n of their examples. Sums grow with n, a factor of a matrix of
    sums with the root of n, a mean does not; so all three measures have to be exceeded."""
    sizes = {}
    for reply in senders:
        value = reply.blocks[name].tensors[tensor]
        if value.is_floating_point():
            n = max(1, reply.samples)
            length = float(value.double().norm())
            sizes[reply.client] = (length, length / n**0.5, length / n)
    for client, own in sizes.items():
        others = [size for c, size in sizes.items() if c != client]
        if len(others) < FEWEST:
            continue
        usual = [middle(measure) for measure in zip(*others, strict=True)]
        if all(mine > FAR * theirs for mine, theirs in zip(own, usual, strict=True)):
            yield client, f"block {name}: {tensor} is too large for its number of examples"


def middle(values: Sequence[float]) -> float:
    """The median of some numbers."""
    return float(median(torch.tensor(values, dtype=torch.float64)))
