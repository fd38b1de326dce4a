"""The meter on the door: exact bytes by stage, position, round, client, direction and kind.

The ledger is a plain list of rows that only grows. It serialises to CSV and back without loss, and every total in a
table is a sum over it. Class ids and example counts are booked as `header`, so that the other kinds can be compared
with the paper's formulas to the byte.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from profcil.errors import RunFolderError

HEADER = "header"


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes of one kind that crossed the door once, in one direction."""

    stage: str  # warmup, round or refresh
    position: int
    round: int
    client: int
    direction: str  # down or up
    kind: str
    bytes: int


COLUMNS = tuple(f.name for f in fields(Entry))


@dataclass
class Ledger:
    entries: list[Entry] = field(default_factory=list)

    def record(
        self, stage: str, position: int, round: int, client: int, direction: str, kinds: Mapping[str, int]
    ) -> None:
        self.entries += [Entry(stage, position, round, client, direction, k, n) for k, n in kinds.items() if n]

    def total(self, **where: object) -> int:
        """Bytes over all entries that match, e.g. `total(direction="up", kind="transport")`."""
        return sum(e.bytes for e in self.entries if all(getattr(e, k) == v for k, v in where.items()))

    def by(self, *columns: str) -> dict[tuple[Any, ...], int]:
        """Bytes summed over groups, e.g. `by("kind", "direction")`."""
        sums: dict[tuple[Any, ...], int] = {}
        for e in self.entries:
            key = tuple(getattr(e, c) for c in columns)
            sums[key] = sums.get(key, 0) + e.bytes
        return sums

    def to_csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(attrgetter(*COLUMNS), self.entries))
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Ledger:
        rows = list(csv.reader(io.StringIO(text)))
        if not rows or tuple(rows[0]) != COLUMNS:
            raise RunFolderError(f"this is not a ledger: its first line must be {','.join(COLUMNS)}")
        return cls([Entry(s, int(p), int(r), int(c), d, k, int(b)) for s, p, r, c, d, k, b in rows[1:]])


def norm_comm(bytes_of: int, reference: int) -> float:
    """NormComm: one ledger divided by another, FedAvg's by custom."""
    return bytes_of / reference if reference else float("nan")


def stream_bytes(entries: Iterable[Entry]) -> int:
    """What the incremental stream cost; the warm-up is common to all methods and reported apart."""
    return sum(e.bytes for e in entries if e.stage != "warmup")
