"""A text file to which a run only appends: its ledger and its events.

The state of a run holds the end of such a text, so that a file that was lost or cut is written again. The beginning of
a long text is sealed: it is in the file alone, and the state has its length and digest. So what a state takes does not
grow with the run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError
from profcil.io.atomic_files import write_bytes

SEAL_BYTES = 1_000_000  # a text is sealed when it is longer than this
CHUNK = 1 << 20


class GrowingFile:
    """A file with a sealed beginning. `mark` is the form in which a state and run.json describe it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sealed = 0  # bytes
        self.hash = hashlib.blake2b(digest_size=16)  # of the sealed beginning

    @property
    def mark(self) -> list[Any]:
        return [self.sealed, self.hash.hexdigest()]

    def digest_with(self, end: bytes) -> str:
        """The digest of the whole text with this end."""
        whole = self.hash.copy()
        whole.update(end)
        return whole.hexdigest()

    def seal(self, written: bytes) -> None:
        """Seals bytes that follow the sealed beginning. They must be in the file; here they are written to the disk."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self.hash.update(written)
        self.sealed += len(written)

    def write_end(self, end: bytes) -> None:
        """Makes the file consist of the sealed beginning and this end."""
        if not self.sealed:
            write_bytes(self.path, end)
            return
        with open(self.path, "r+b") as file:
            file.seek(self.sealed)
            found = file.read(len(end))
            same = len(found) if end.startswith(found) else 0  # the end of the state before, to which more is appended
            file.seek(self.sealed + same)
            file.write(end[same:])
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def restore(self, mark: list[Any]) -> None:
        """Takes over the mark of a state. Refuses a file whose beginning is not what was sealed."""
        length, digest = mark
        total = hashlib.blake2b(digest_size=16)
        if length:
            for chunk in read_beginning(self.path, length):
                total.update(chunk)
        if total.hexdigest() != digest:
            raise RunFolderError(
                f"the first {length} bytes of {self.path} are not what the run wrote; restore the file, or start the "
                "run again with another --out"
            )
        self.sealed = length
        self.hash = total


def read_beginning(path: Path, length: int) -> Iterator[bytes]:
    """The first bytes of a file, in parts. They end early if the file does, or if there is none."""
    try:
        with open(path, "rb") as file:
            while length and (chunk := file.read(min(CHUNK, length))):
                length -= len(chunk)
                yield chunk
    except FileNotFoundError:
        return
