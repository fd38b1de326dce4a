"""The ledger of the channel: exact bytes by stage, position, round, client, direction and kind.

It is an append-only list of entries, which can be written to CSV and read back without loss. Every total in a table is
a sum over it. Class ids and example counts are recorded under the kind `header`, so that the other kinds can be
compared with the paper's formulas to the byte.
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
    """Bytes of one kind in one message."""

    stage: str  # warmup, dictionary, round or refresh
    position: int
    round: int
    client: int
    direction: str  # down or up
    kind: str
    bytes: int


COLUMNS = tuple(field.name for field in fields(Entry))


@dataclass
class Ledger:
    """All bytes that were sent in a run. In a long run, the first entries are sealed: they are in a file alone."""

    entries: list[Entry] = field(default_factory=list)
    sealed_bytes: int = 0  # of the stream, in sealed entries

    @property
    def stream_bytes(self) -> int:
        """The bytes of the incremental stream so far."""
        return self.sealed_bytes + stream_bytes(self.entries)

    def seal(self, count: int) -> None:
        """Drops the first entries, and keeps their sum."""
        self.sealed_bytes += stream_bytes(self.entries[:count])
        del self.entries[:count]

    def record(
        self, stage: str, position: int, round: int, client: int, direction: str, kinds: Mapping[str, int]
    ) -> None:
        """Append an entry for every kind with a nonzero number of bytes."""
        for kind, size in kinds.items():
            if size:
                entry = Entry(stage, position, round, client, direction, kind, size)
                self.entries.append(entry)

    def total(self, **where: object) -> int:
        """The bytes of all entries that match, e.g. `total(direction="up", kind="transport")`."""
        return sum(entry.bytes for entry in self.entries if _matches(entry, where))

    def by(self, *columns: str) -> dict[tuple[Any, ...], int]:
        """The bytes of every group of entries, e.g. `by("kind", "direction")`."""
        sums: dict[tuple[Any, ...], int] = {}
        for entry in self.entries:
            key = tuple(getattr(entry, column) for column in columns)
            sums[key] = sums.get(key, 0) + entry.bytes
        return sums

    def to_csv(self) -> str:
        """The ledger as CSV text with a header line."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        row_of = attrgetter(*COLUMNS)
        writer.writerows(map(row_of, self.entries))
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Ledger:
        """The ledger in a CSV text of `to_csv`."""
        rows = list(csv.reader(io.StringIO(text)))
        if not rows or tuple(rows[0]) != COLUMNS:
            header = ",".join(COLUMNS)
            raise RunFolderError(f"this is not a ledger: the first line must be {header}; run it again")
        entries = []
        for stage, position, round, client, direction, kind, count in rows[1:]:
            entry = Entry(stage, int(position), int(round), int(client), direction, kind, int(count))
            entries.append(entry)
        return cls(entries)


def _matches(entry: Entry, where: Mapping[str, object]) -> bool:
    return all(getattr(entry, column) == value for column, value in where.items())


def stream_bytes(entries: Iterable[Entry]) -> int:
    """The bytes of the incremental stream, without the warm-up, which is the same for all methods."""
    return sum(entry.bytes for entry in entries if entry.stage != "warmup")
