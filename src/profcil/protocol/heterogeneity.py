"""The paper's two controls: supervision imbalance (support, coverage) and stage misalignment (disorder).

Every fraction becomes a count by rounding half up, floor(x + 0.5), so that 0.5 x 5 labels are 3 on every machine.
Every sampler is given its generator and draws for all clients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, gcd

import numpy as np

from profcil.errors import unknown

Random = np.random.Generator


def round_half_up(x: float) -> int:
    """The nearest whole number, halves rounded up (Python's `round` rounds 2.5 to 2)."""
    return floor(x + 0.5)


def share_of(fraction: float, total: int) -> int:
    """A fraction of a total, rounded half up and at least 1, so that every task has a supporter with a label."""
    return max(1, round_half_up(fraction * total))


def draw_supporters(clients: int, support: float, random: Random) -> np.ndarray:
    """A uniform set of supporting clients, ascending. For the same draw, a smaller support gives a subset."""
    count = share_of(support, clients)
    shuffled = random.permutation(clients)
    return np.sort(shuffled[:count])


def missing_labels(supporters: int, classes: int, coverage: float) -> int:
    """By how many labels the quotas of a task fall short of its number of classes; usually 0."""
    assigned = supporters * share_of(coverage, classes)
    return max(0, classes - assigned)


def draw_quotas(supporters: int, classes: int, coverage: float, random: Random) -> np.ndarray:
    """Labels per supporter. Quotas too small to cover the task are raised evenly until they just do."""
    missing = missing_labels(supporters, classes, coverage)
    gets_one_more = np.arange(supporters) < missing % supporters
    smallest = share_of(coverage, classes) + missing // supporters
    return smallest + random.permutation(gets_one_more)


def assign_labels(quotas: np.ndarray, classes: Sequence[int], random: Random) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (supporter row, label): a row's labels are distinct, every class is used, class counts differ by at most 1.

    Rows take consecutive labels from a shuffled list of all classes, which is read cyclically. A new shuffle starts
    only where a row and the list end together, so no row gets a class twice. That is every |Y| / gcd(|Y|, quota) rows.
    """
    size = len(classes)
    rows = np.arange(len(quotas))
    block = size // gcd(size, int(quotas.min()))  # rows per shuffle; raised quotas use each class once: one block
    blocks = ceil(len(quotas) / block)
    unshuffled = np.tile(np.asarray(classes, dtype=np.int64), (blocks, 1))
    shuffles = random.permuted(unshuffled, axis=1)
    start = np.cumsum(quotas) - quotas
    offset = np.arange(int(quotas.max()))
    block_of_row = rows // block
    place = (start[:, None] + offset) % size
    labels = shuffles[block_of_row[:, None], place]
    within_quota = offset < quotas[:, None]
    row_of = np.broadcast_to(rows[:, None], within_quota.shape)
    return row_of[within_quota], labels[within_quota]


def derange(clients: int, tasks: int, disorder: float, random: Random) -> np.ndarray:
    """Orders [clients, tasks]: for each client, disorder x T positions are drawn and their tasks are deranged.

    Fewer than two positions cannot be deranged, so the order is then unchanged.
    """
    orders = np.tile(np.arange(tasks, dtype=np.int32), (clients, 1))
    drawn = round_half_up(disorder * tasks)
    if drawn < 2:
        return orders
    shuffled = np.argsort(random.random((clients, tasks)), axis=1, kind="stable")
    positions = shuffled[:, :drawn].astype(np.int32)
    permutations = derangements(clients, drawn, random)
    deranged = np.take_along_axis(positions, permutations, axis=1)
    np.put_along_axis(orders, positions, deranged, axis=1)
    return orders


def derangements(rows: int, size: int, random: Random) -> np.ndarray:
    """Uniform permutations of 0 to size - 1 without a fixed point, one per row; `size` is at least 2.

    By rejection: a row with a fixed point is drawn again.
    """
    identity = np.arange(size)
    permutations = np.empty((rows, size), dtype=np.int64)
    pending = np.arange(rows)
    while len(pending):
        ordered = np.tile(identity, (len(pending), 1))
        drawn = random.permuted(ordered, axis=1)
        permutations[pending] = drawn
        has_fixed_point = (drawn == identity).any(axis=1)
        pending = pending[has_fixed_point]
    return permutations


def adjacent(clients: int, tasks: int, disorder: float, random: Random) -> np.ndarray:
    """Orders [clients, tasks]: one pass from left to right swaps each adjacent pair with probability `disorder`."""
    orders = np.tile(np.arange(tasks, dtype=np.int32), (clients, 1))
    pairs = max(0, tasks - 1)
    swaps = random.random((clients, pairs)) < disorder
    for p in range(tasks - 1):
        swapped = swaps[:, p]
        left = orders[swapped, p]
        right = orders[swapped, p + 1]
        orders[swapped, p] = right
        orders[swapped, p + 1] = left
    return orders


SAMPLERS = {"derange": derange, "adjacent": adjacent}


def draw_orders(sampler: str, clients: int, tasks: int, disorder: float, random: Random) -> np.ndarray:
    """The task orders pi_c[p], as task ids [clients, tasks], drawn by the named sampler."""
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    return SAMPLERS[sampler](clients, tasks, disorder, random)
