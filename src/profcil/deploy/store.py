"""What a client keeps at its own site between two messages: blocks it was sent, and its private memory.

A message may be answered by a fresh process, so everything lies in a folder, `run/client`, in files that are whole or
not there. Private memories have names (tickets): the server says which one its last accepted reply left behind, so a
turn that was lost on the way, or that a restarted server plays again, starts from where it started before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from profcil.deploy.wire import seal
from profcil.engine.payload import Block
from profcil.io.atomic_files import read_tensors, write_tensors
from profcil.io.cache_folder import cache_folder

UNUSED_DAYS = 30  # after which what a run left behind is removed


def home() -> Path:
    """Where sites keep what belongs to runs."""
    return cache_folder() / "sites"


class Keep:
    """One client's folder of one run."""

    def __init__(self, root: Path, run: str, client: int) -> None:
        safe = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()  # the name comes from outside
        self.path = Path(root) / safe / str(client)
        self.path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, block: Block) -> None:
        facts = {"name": name, "kind": block.kind, "labels": list(block.labels), "version": block.version}
        write_tensors(self.file(name), block.tensors, facts | {"seal": seal(block)})

    def get(self, name: str, digest: str) -> Block | None:
        """The block that is meant; one that is here under another name gets this one, too."""
        found = read_tensors(self.file(name))
        if found is None or found[1]["seal"] != digest:
            other = next((n for n, held in self.holds().items() if held == digest and n != name), None)
            if other is not None and (block := self.get(other, digest)) is not None:
                self.put(name, block)
                return block
            return None
        tensors, facts = found
        return Block(facts["kind"], tensors, tuple(facts["labels"]), facts["version"])

    def holds(self) -> dict[str, str]:
        """Block → digest of what is here; nothing is read but the headers."""
        from safetensors import SafetensorError, safe_open

        found = {}
        for path in sorted(self.path.glob("block-*.safetensors")):
            try:
                with safe_open(path, framework="np") as file:
                    facts = json.loads((file.metadata() or {})["facts"])
                found[facts["name"]] = facts["seal"]
            except (SafetensorError, OSError, KeyError, ValueError):
                continue
        return found

    def private(self, ticket: int) -> dict[str, Tensor] | None:
        found = read_tensors(self.ticket(ticket)) if ticket else None
        return found[0] if found else None

    def put_private(self, ticket: int, tensors: Mapping[str, Tensor], last: int) -> None:
        """Keeps this memory and the one it came from; older ones cannot be asked for again."""
        write_tensors(self.ticket(ticket), tensors, {})
        for path in self.path.glob("private-*.safetensors"):
            if path not in (self.ticket(ticket), self.ticket(last)):
                path.unlink(missing_ok=True)

    def file(self, name: str) -> Path:
        return self.path / f"block-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}.safetensors"

    def ticket(self, ticket: int) -> Path:
        return self.path / f"private-{int(ticket)}.safetensors"


def sweep(root: Path) -> None:
    """Removes what runs have left behind that nobody has used for a month."""
    for path in Path(root).glob("*/*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > UNUSED_DAYS * 86400:
            shutil.rmtree(path, ignore_errors=True)
