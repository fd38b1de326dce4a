"""The paper's two controls: supervision imbalance (support, coverage) and stage misalignment (disorder).

Every fraction becomes a count by rounding half up, floor(x + 0.5), so that 0.5 x 5 labels are 3 on every machine.
All samplers take the generator they draw from and work on all clients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, gcd

import numpy as np

from profcil.errors import unknown

Random = np.random.Generator


def half_up(x: float) -> int:
    """The nearest whole number, halves upwards (Python's own `round` would send 2.5 to 2)."""
    return floor(x + 0.5)


def share_of(fraction: float, total: int) -> int:
    """max(1, fraction x total): nobody is left without a supporter or a label."""
    return max(1, half_up(fraction * total))


def draw_supporters(clients: int, support: float, random: Random) -> np.ndarray:
    """A uniform set of supporting clients, ascending; with the same draw, a smaller support is a subset of a larger."""
    return np.sort(random.permutation(clients)[: share_of(support, clients)])


def growth(supporters: int, classes: int, coverage: float) -> int:
    """How many labels the quotas of a task lack, together, to reach all its classes; usually none."""
    return max(0, classes - supporters * share_of(coverage, classes))


def draw_quotas(supporters: int, classes: int, coverage: float, random: Random) -> np.ndarray:
    """Labels per supporter; where they could not cover the task they grow, evenly, until they just do."""
    grown = growth(supporters, classes, coverage)
    extra = np.arange(supporters) < grown % supporters
    return share_of(coverage, classes) + grown // supporters + random.permutation(extra)


def cover(quotas: np.ndarray, classes: Sequence[int], random: Random) -> tuple[np.ndarray, np.ndarray]:
    """Which supporter (by row) is given which labels: distinct per row, every class used, counts within one.

    Rows deal from shuffled decks of all classes. A new shuffle starts only where a row and a deck end together, so
    no row can meet a class twice; that is every |Y| / gcd(|Y|, quota) rows.
    """
    size, rows = len(classes), np.arange(len(quotas))
    block = size // gcd(size, int(quotas.min()))  # grown quotas use one deck in all, hence one block
    decks = random.permuted(np.tile(np.asarray(classes, dtype=np.int64), (-(-len(quotas) // block), 1)), axis=1)
    start = np.cumsum(quotas) - quotas
    cards = np.arange(int(quotas.max()))
    dealt = decks[(rows // block)[:, None], (start[:, None] + cards) % size]
    held = cards < quotas[:, None]
    return np.broadcast_to(rows[:, None], held.shape)[held], dealt[held]


def derange(clients: int, tasks: int, disorder: float, random: Random) -> np.ndarray:
    """Orders [clients, tasks]: per client, disorder x T positions are drawn and the tasks there change place.

    The derangement is uniform, by rejection: whoever still has a fixed point draws again. Fewer than two drawn
    positions cannot be deranged and leave the order alone.
    """
    orders = np.tile(np.arange(tasks, dtype=np.int32), (clients, 1))
    drawn = half_up(disorder * tasks)
    if drawn < 2:
        return orders
    places = np.argsort(random.random((clients, tasks)), axis=1, kind="stable")[:, :drawn].astype(np.int32)
    np.put_along_axis(orders, places, np.take_along_axis(places, derangements(clients, drawn, random), axis=1), axis=1)
    return orders


def derangements(rows: int, size: int, random: Random) -> np.ndarray:
    """Independent uniform permutations of 0 to size - 1 (at least 2) without a fixed point, one per row."""
    still = np.arange(size)
    found = np.empty((rows, size), dtype=np.int64)
    pending = np.arange(rows)
    while len(pending):
        found[pending] = random.permuted(np.tile(still, (len(pending), 1)), axis=1)
        pending = pending[(found[pending] == still).any(axis=1)]
    return found


def adjacent(clients: int, tasks: int, disorder: float, random: Random) -> np.ndarray:
    """Orders [clients, tasks]: one pass from left to right swaps each pair of neighbours with probability disorder."""
    orders = np.tile(np.arange(tasks, dtype=np.int32), (clients, 1))
    swaps = random.random((clients, max(0, tasks - 1))) < disorder
    for p in range(tasks - 1):
        who = swaps[:, p]
        orders[who, p], orders[who, p + 1] = orders[who, p + 1], orders[who, p]
    return orders


SAMPLERS = {"derange": derange, "adjacent": adjacent}


def draw_orders(sampler: str, clients: int, tasks: int, disorder: float, random: Random) -> np.ndarray:
    """pi_c[p] as an array [clients, tasks] of task ids, by the named sampler."""
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    return SAMPLERS[sampler](clients, tasks, disorder, random)
