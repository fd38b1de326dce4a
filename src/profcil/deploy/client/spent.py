"""What a site has sent with noise in a run, counted in its own folder: no server can make it send more than planned.

The unit example counts what is sent at each position, as an example belongs to one; the unit client counts everything.
Something that is sent again as it was is not counted again: it has the same noise and reveals nothing new. A secure sum
counts when the site helps to take off its masks: unless enough clients do, they stay. The same sum again must be the
same in all parts: with other numbers of one client, or of other clients, the difference of the two would have the noise
of few shares. So a site takes part in it again with the same numbers alone, and for the same clients.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from profcil.engine.channel import When
from profcil.errors import Failure
from profcil.privacy.meter import BEFORE_STREAM, Meter
from profcil.privacy.protection import Protection

Found = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Release:
    """Something with noise that a client is asked for."""

    name: str  # differs for different content
    client: int
    stage: str
    position: int
    round: int
    by_client: bool  # whether the client is protected, or one example
    most: int  # that may be sent about one of them
    sum: str = ""  # the name of the sum that it is a part of

    def check(self, path: Path) -> None:
        """Raises an error if sending this would be too much."""
        with opened(path) as file:
            self.check_among(read(file), None)

    def note(self, path: Path, clients: Collection[int] = ()) -> None:
        """Counts this, and raises an error if it is too much. `clients` are those whose numbers are in the sum."""
        with opened(path) as file:
            found = read(file)
            self.check_among(found, clients)
            if not self.among(found):
                entry = {**vars(self), "clients": sorted(clients)}
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def among(self, found: Found) -> bool:
        return any(entry["name"] == self.name for entry in found)

    def check_among(self, found: Found, clients: Collection[int] | None) -> None:
        self.check_same_sum(found, clients)
        if self.among(found) or spent([*found, vars(self)], self.by_client) <= self.most:
            return
        unit = "client" if self.by_client else "example"
        raise Failure(
            f"client {self.client} is asked for something new in {self.stage} {self.round + 1} of position "
            f"{self.position + 1}, but it has sent as much as the settings of the app plan for one {unit} "
            f"({self.most} noised replies), so it sends nothing"
        )

    def check_same_sum(self, found: Found, clients: Collection[int] | None) -> None:
        """A sum that comes again must be the same sum. Before its last message the clients in it are not known."""
        for entry in found:
            if not self.sum or entry["sum"] != self.sum:
                continue
            if entry["name"] != self.name:
                raise Failure(
                    f"client {self.client} has taken part in this secure sum before, with other numbers: the "
                    "difference would have little noise, so it sends nothing"
                )
            if clients is not None and entry["clients"] != sorted(clients):
                raise Failure(
                    f"client {self.client} has taken part in this secure sum before, with the clients "
                    f"{entry['clients']}: the difference would have little noise, so the same ones must take part"
                )


def release_at(protection: Protection, name: str, client: int, when: When, sum: str = "") -> Release:
    """What a client is asked for at a moment, and how much the settings allow."""
    most = int(Meter(protection).most_releases)
    return Release(name, client, when.stage, when.position, when.round, protection.by_client, most, sum)


def spent(entries: Found, by_client: bool) -> int:
    """How much has been sent about a client, or about one example."""
    if by_client:
        return len(entries)
    before = sum(entry["stage"] in BEFORE_STREAM for entry in entries)
    during = Counter(entry["position"] for entry in entries if entry["stage"] not in BEFORE_STREAM)
    return before + max(during.values(), default=0)


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file, locked: of two messages at one time, the second sees what the first has counted."""
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def read(file: TextIO) -> list[dict[str, Any]]:
    """What has been counted. A file that cannot be read counts as full."""
    file.seek(0)
    try:
        return [json.loads(line) for line in file]
    except ValueError:
        raise Failure(
            f"{file.name} is damaged, so it is unknown what the site has spent; end the run, or correct the file"
        ) from None
