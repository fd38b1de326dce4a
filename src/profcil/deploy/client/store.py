"""Files that a client stores at its own site between two messages: received blocks and private tensors.

Each message may be handled by a new process, so everything is on disk, in `run/client`, written atomically. Private
tensors are stored under an id. The server's next request gives the id that belongs to the last accepted reply. So a
turn whose reply was lost, or that a restarted server requests again, starts from the same tensors as before. During a
secure sum the folder has the client's secrets, too. In runs with noise it has the secret from which that is drawn, and
what has been sent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from profcil.deploy.wire import block_digest
from profcil.engine.channel import Block
from profcil.io.atomic_files import read_tensors, write_tensors, write_text
from profcil.io.cache_folder import cache_folder, make_private_folder

UNUSED_DAYS = 30  # a run's files are removed when they have not been used for this long
SECONDS_PER_DAY = 86400
SECRET_BYTES = 32


def default_home() -> Path:
    """The folder for the files of all runs, where the node's configuration names none."""
    return cache_folder() / "sites"


class SiteStore:
    """The folder of one client in one run."""

    def __init__(self, root: Path, run: str, client: int) -> None:
        # The run's name comes over the network. Its hash is a safe folder name.
        folder = short_hash(run)
        self.path = Path(root) / folder / str(client)
        make_private_folder(self.path)
        self.path.chmod(0o700)  # older versions left it readable by all

    def write_block(self, name: str, block: Block) -> None:
        facts = {"name": name, "kind": block.kind, "labels": list(block.labels), "version": block.version}
        write_tensors(self.block_path(name), block.tensors, facts | {"seal": block_digest(block)})

    def read_block(self, name: str, digest: str) -> Block | None:
        """The block with this digest, or None. A block stored under another name is also stored under this one."""
        found = read_tensors(self.block_path(name))
        if found is None or found[1]["seal"] != digest:
            return self.copy_from_other_name(name, digest)
        tensors, facts = found
        return Block(facts["kind"], tensors, tuple(facts["labels"]), facts["version"])

    def latest_block(self, name: str) -> Block | None:
        """The block that is stored under a name, in whatever version."""
        digest = self.stored_digests().get(name)
        return None if digest is None else self.read_block(name, digest)

    def copy_from_other_name(self, name: str, digest: str) -> Block | None:
        others = (other for other, held in self.stored_digests().items() if held == digest and other != name)
        other = next(others, None)
        block = None if other is None else self.read_block(other, digest)
        if block is not None:
            self.write_block(name, block)
        return block

    def stored_digests(self) -> dict[str, str]:
        """The digest of each stored block, by name. Only the files' headers are read."""
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

    def read_private(self, private_id: int) -> dict[str, Tensor] | None:
        """The private tensors with this id, or None. The id 0 stands for no tensors."""
        found = read_tensors(self.private_path(private_id)) if private_id else None
        return found[0] if found else None

    def write_private(self, private_id: int, tensors: Mapping[str, Tensor], previous_id: int) -> None:
        """Stores private tensors and removes all older ones but their predecessor: only these two can be requested."""
        write_tensors(self.private_path(private_id), tensors, {})
        needed = (self.private_path(private_id), self.private_path(previous_id))
        for path in self.path.glob("private-*.safetensors"):
            if path not in needed:
                path.unlink(missing_ok=True)

    def noise_secret(self) -> int:
        """A random number that never leaves this folder. Noise on replies is drawn from it; a reply that is requested
        again has the same noise."""
        path = self.path / "noise-secret"
        if not path.exists():
            write_text(path, secrets.token_hex(SECRET_BYTES))
        return int(path.read_text(), 16)

    @property
    def sum_state(self) -> Path:
        """The file with the secrets of an open secure sum (`client/sums`)."""
        return self.path / "open-sum.json"

    @property
    def sum_vector(self) -> Path:
        """The file with the numbers that are to be added."""
        return self.path / "open-sum-vector"

    @property
    def spent(self) -> Path:
        """The file with what has been sent with noise (`client/spent`)."""
        return self.path / "spent.jsonl"

    def forget_sum(self) -> None:
        """Removes what is stored of an open secure sum."""
        for path in self.path.glob("open-sum*"):
            path.unlink(missing_ok=True)

    def block_path(self, name: str) -> Path:
        return self.path / f"block-{short_hash(name)}.safetensors"

    def private_path(self, private_id: int) -> Path:
        return self.path / f"private-{int(private_id)}.safetensors"


def short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def remove_unused(root: Path) -> None:
    """Removes the folders of runs that have not been used for a month."""
    for path in Path(root).glob("*/*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > UNUSED_DAYS * SECONDS_PER_DAY:
            shutil.rmtree(path, ignore_errors=True)
