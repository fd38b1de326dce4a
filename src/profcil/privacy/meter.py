"""What a run spends of its privacy budget: counted from the ledger, and expected from the plan.

A release is a reply with anything but a header. An example belongs to one position, so releases of different positions
concern different examples: for the unit example the position with the most counts, and the stages before the stream are
added. For the unit client all releases of a client add up. There the noise is that of a sum of replies; where fewer
clients answer than planned, a release counts for more. A secure sum always has the whole noise, and is one release of
each of its clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from profcil.engine.channel import When
from profcil.errors import Failure
from profcil.metrics.ledger import HEADER, Entry
from profcil.privacy.accountant import multiplier_of
from profcil.privacy.protection import Protection
from profcil.protocol.participation import participants, warmup_participants
from profcil.protocol.plan import Plan

BEFORE_STREAM = ("warmup", "dictionary")
Place = tuple[str, int, int]  # stage, position, round


class BudgetSpent(Failure):
    """The next round would spend more than the budget. Everything before it is saved."""


@dataclass(frozen=True)
class Meter:
    """Counts releases of a protected run."""

    protection: Protection

    def spent(self, entries: Iterable[Entry], more: Counter[int] | None = None, position: int = 0) -> float:
        """ε of the client or example that has lost most, after these entries of the ledger, and `more` releases by
        client at a position."""
        releases = releases_of(entries)
        if more:
            place = ("next", position, 0)
            releases |= {(client, place): count for client, count in more.items() if count}
        total = self.by_client(releases) if self.protection.by_client else self.by_example(releases)
        return self.planned(total)

    def facts(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """What has been spent, for run.json. An ε that is not finite is written as text, since JSON has none."""
        epsilon = self.spent(entries)
        return {
            "unit": self.protection.settings.unit,
            "epsilon": epsilon if math.isfinite(epsilon) else "inf",
            "delta": self.protection.settings.delta,
            "noise": self.protection.multiplier,
        }

    def planned(self, releases: float) -> float:
        """ε after this many releases about one unit."""
        return self.protection.epsilon(releases)

    @property
    def most_releases(self) -> float:
        """How many releases about one unit the settings allow: as many as ε does, or where none is given as planned."""
        settings = self.protection.settings
        if not settings.epsilon:
            return self.protection.releases
        if self.protection.steps:
            return most_below(self.planned, settings.epsilon * (1 + 1e-6))
        once = multiplier_of(settings.epsilon, settings.delta)
        return math.floor((self.protection.multiplier / once) ** 2 * (1 + 1e-6))

    def by_client(self, releases: dict[tuple[int, Place], int]) -> float:
        """The largest number of releases of a client, each in units of one with as many replies as planned."""
        answered = Counter(place for _, place in releases)
        totals: dict[int, float] = {}
        for (client, place), count in releases.items():
            totals[client] = totals.get(client, 0.0) + count * max(1.0, self.protection.clients / answered[place])
        return max(totals.values(), default=0.0)

    def by_example(self, releases: dict[tuple[int, Place], int]) -> float:
        """The largest number of releases that an example takes part in."""
        before: Counter[int] = Counter()
        during: Counter[tuple[int, int]] = Counter()
        for (client, (stage, position, _)), count in releases.items():
            if stage in BEFORE_STREAM:
                before[client] += count
            else:
                during[client, position] += count
        clients = {*before, *(client for client, _ in during)}
        most = {c: max((n for (client, _), n in during.items() if client == c), default=0) for c in clients}
        return float(max((before[c] + most[c] for c in clients), default=0))

    def check(self, method: Any, plan: Plan, entries: Sequence[Entry], clients: Sequence[int], when: When) -> None:
        """Stops the run if the round that comes next could spend more than the budget."""
        budget = self.protection.settings.epsilon
        if not budget:
            return
        done = Counter(releases_at(entries, when.position))
        more: Counter[int] = Counter()
        for client in clients:
            taken = [w for w in rounds_until(when) if client in participants(plan, w.position, w.round)]
            more[client] = max(0, method.releases(taken) - done[client])
        after = self.spent(entries, more, when.position)
        if after > budget * (1 + 1e-6):
            now = self.spent(entries)
            raise BudgetSpent(
                f"the privacy budget is spent: ε = {now:.3g} so far, and round {when.round + 1} of position "
                f"{when.position + 1} would make it {after:.3g} of {budget:g}; everything up to here is saved"
            )


def most_below(rising: Callable[[float], float], limit: float) -> int:
    """The largest whole number at which a rising function is within the limit."""
    high = 1
    while rising(high) <= limit:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if rising(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def rounds_until(when: When) -> list[When]:
    """The rounds of a position up to this one."""
    return [When("round", when.position, r, when.rounds) for r in range(when.round + 1)]


def releases_of(entries: Iterable[Entry]) -> dict[tuple[int, Place], int]:
    """How many replies with content a client sent at each place of the stream."""
    kinds: Counter[tuple[int, Place, str]] = Counter()
    for e in entries:
        if e.direction == "up" and e.kind != HEADER:
            kinds[e.client, (e.stage, e.position, e.round), e.kind] += 1
    releases: dict[tuple[int, Place], int] = {}
    for (client, place, _), count in kinds.items():
        releases[client, place] = max(count, releases.get((client, place), 0))
    return releases


def releases_at(entries: Iterable[Entry], position: int) -> list[int]:
    """The clients of the releases at a position of the stream, one for each release."""
    found: list[int] = []
    for (client, (stage, at, _)), count in releases_of(entries).items():
        if stage not in BEFORE_STREAM and at == position:
            found += [client] * count
    return found


def planned_releases(
    method: Any, plan: Plan, rounds: int, warmup_rounds: int, by_client: bool, summed: bool = False
) -> float:
    """The most releases that an example or a client takes part in over a whole run, if all clients answer. Secure sums
    have the whole noise, however many clients answer."""
    totals: Counter[int] = Counter()
    for r in range(warmup_rounds):
        totals.update(warmup_participants(plan, r))
    by_position = [planned_at(method, plan, position, rounds) for position in range(plan.positions)]
    if not by_client:
        return float(max((max(found.values(), default=0) for found in by_position), default=0))
    planned = 1 if summed else plan.settings.participants
    weighted = {client: float(count) for client, count in totals.items()}
    for position, found in enumerate(by_position):
        answering = len(participants(plan, position, 0)) or 1
        for client, count in found.items():
            weighted[client] = weighted.get(client, 0.0) + count * max(1.0, planned / answering)
    return max(weighted.values(), default=0.0)


def planned_at(method: Any, plan: Plan, position: int, rounds: int) -> dict[int, int]:
    """The most releases of each client at a position."""
    taken: dict[int, list[When]] = {}
    for r in range(rounds):
        for client in participants(plan, position, r):
            taken.setdefault(client, []).append(When("round", position, r, rounds))
    return {client: method.releases(whens) for client, whens in taken.items()}
