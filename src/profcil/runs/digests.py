"""Digests of a run's readable files, recorded in run.json, so that a file that was changed later is noticed.

They find damage and edits by mistake. They are not signatures: who can write the folder can write digests, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KEY = "digests"
SELF = "run.json"


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def with_digests(facts: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json: the facts, and the digests of the other files and of itself."""
    full = json.loads(json.dumps({**facts, KEY: known}))
    full[KEY][SELF] = digest_of_facts(full)
    return full


def digest_of_facts(facts: Mapping[str, Any]) -> str:
    """A digest of the values in run.json, whatever their order and spacing."""
    others = {name: value for name, value in facts[KEY].items() if name != SELF}
    return digest(json.dumps({**facts, KEY: others}, sort_keys=True).encode())


def changed_files(path: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """The names of the files that differ from what the run wrote. Runs of older versions have no digests.

    Files besides run.json are compared only if the run is done. While it is computed, and after it was killed, some may
    belong to a later state than run.json does.
    """
    known = facts.get(KEY)
    if known is None:
        return
    if not isinstance(known, dict) or known.get(SELF) != digest_of_facts(facts) or has_other_numbers(path / SELF):
        yield SELF
        return
    if not facts.get("done"):
        return
    for name, value in known.items():
        file = path / name
        if name != SELF and file.exists() and not has_digest(file, value):
            yield name


def has_other_numbers(file: Path) -> bool:
    """Whether a JSON file holds a number that Python would write in another way.

    The last digit of 0.30000000000000004 can be changed without changing the value, and so without changing its digest.
    """
    literals: list[str] = []
    json.loads(file.read_bytes(), parse_float=literals.append)
    return any(repr(float(literal)) != literal for literal in literals)


def has_digest(file: Path, known: Any) -> bool:
    """Whether a file, or its beginning where a length is recorded, has a digest."""
    data = file.read_bytes()
    if isinstance(known, list):
        length, expected = known
        return len(data) >= length and digest(data[:length]) == expected
    return digest(data) == known
