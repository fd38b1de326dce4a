"""Writes every version of a lock file into the constraints: `python pins.py requirements.lock constraints.txt`.

Pins that the lock does not have (torch, the documentation's) stay.
"""

from __future__ import annotations

import sys
from pathlib import Path


def entries(text: str) -> dict[str, list[str]]:
    """The requirements of a lock or of constraints by package, without hashes. One may have several, by marker."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        requirement = line.removesuffix("\\").strip()
        if requirement and requirement[0] not in "#-":
            found.setdefault(requirement.partition("==")[0], []).append(requirement)
    return found


def with_pins(constraints: str, lock: str) -> str:
    """The constraints with the versions of the lock. Comments at the top stay."""
    comments = [line for line in constraints.splitlines() if line.startswith("#")]
    pins = entries(constraints) | entries(lock)
    lines = [requirement for name in sorted(pins, key=str.lower) for requirement in pins[name]]
    return "\n".join([*comments, *lines]) + "\n"


if __name__ == "__main__":
    lock, constraints = map(Path, sys.argv[1:])
    constraints.write_text(with_pins(constraints.read_text(), lock.read_text()))
