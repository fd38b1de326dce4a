"""How many attacks were tried, refused, and survived: read without harm. By kind, which is the name of a test."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

PROPERTY = "attacks"  # under which the report of a test holds its counts
HEAD = ("kind", "tried", "refused", "survived", "harmful")


@dataclass
class Counts:
    tried: int = 0
    refused: int = 0
    survived: int = 0

    @property
    def harmful(self) -> int:
        """Attacks after which a test failed."""
        return self.tried - self.refused - self.survived

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tried + other.tried, self.refused + other.refused, self.survived + other.survived)


@dataclass
class Attempt:
    refused: bool = False


running = Counts()  # of the test that runs


def begin() -> Counts:
    """Starts counting for another test."""
    global running
    running = Counts()
    return running


@contextmanager
def attempt() -> Iterator[Attempt]:
    """One attack. Who refuses it sets `refused`; an exception makes it harmful."""
    counts, one = running, Attempt()
    counts.tried += 1
    yield one
    counts.refused += one.refused
    counts.survived += not one.refused


def kind_of(test: str) -> str:
    """`test_own_data[texts]` → `own data: texts`."""
    name, _, case = re.sub(r"^test_", "", test).partition("[")
    return name.replace("_", " ") + (f": {case.removesuffix(']')}" if case else "")


def described(found: Mapping[str, Counts]) -> list[str]:
    """A table with a line for each kind, and the sum."""
    whole = sum(found.values(), Counts())
    rows = [HEAD, *((k, *numbers(c)) for k, c in sorted(found.items())), ("all", *numbers(whole))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def numbers(counts: Counts) -> list[str]:
    return [f"{n:,}" for n in (*asdict(counts).values(), counts.harmful)]
