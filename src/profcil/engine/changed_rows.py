"""Which rows of a memory have changed since a client last received it (`channel.rows = "changed"`).

For each class the server stores a digest of the row as it is sent, and the version of the block since which the row has
been so. A client that holds version v of the block is sent the rows that are newer than v. Its block is then complete
to the bit: both sides compute with what they would without this setting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from profcil.engine.channel import Block

DIGEST_BYTES = 8


@dataclass(frozen=True)
class RowHistory:
    """The rows of one block when it was last sent."""

    version: int  # of the block
    since: Mapping[int, int]  # class → version of the block since which its row is as it is
    digests: Mapping[int, str]  # class → digest of its row
    complete: int = 0  # the version since which no class was removed

    def missing(self, held: int) -> frozenset[int] | None:
        """The classes whose rows a client with this version lacks; None if it has to be sent the whole block."""
        if held < self.complete:
            return None
        return frozenset(label for label, version in self.since.items() if version > held)

    def to_json(self) -> list[Any]:
        return [self.version, self.complete, [[y, self.since[y], self.digests[y]] for y in self.since]]

    @classmethod
    def from_json(cls, values: list[Any]) -> RowHistory:
        version, complete, rows = values
        since = {label: first for label, first, _ in rows}
        digests = {label: digest for label, _, digest in rows}
        return cls(version, since, digests, complete)


def has_rows(block: Block) -> bool:
    """Whether every tensor of a block has one row for each class."""
    tensors = block.tensors.values()
    return block.kind == "memory" and all(t.dim() and len(t) == len(block.labels) for t in tensors)


def updated(history: RowHistory | None, block: Block) -> RowHistory:
    """The history after a block is sent. The block is in the form in which it is sent."""
    if history is not None and history.version == block.version:
        return history
    digests = row_digests(block)
    if history is None:
        return RowHistory(block.version, dict.fromkeys(digests, block.version), digests, block.version)
    since = {}
    for label, digest in digests.items():
        same = history.digests.get(label) == digest
        since[label] = history.since[label] if same else block.version
    removed = history.digests.keys() - digests.keys()
    complete = block.version if removed else history.complete
    return RowHistory(block.version, since, digests, complete)


def row_digests(block: Block) -> dict[int, str]:
    """A digest of each class's row over all tensors."""
    parts = [row_bytes(tensor) for tensor in block.tensors.values()]
    table = torch.cat(parts, 1).numpy() if parts else torch.zeros(len(block.labels), 0).numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).hexdigest() for row in table]
    return dict(zip(block.labels, digests, strict=True))


def row_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, [rows, bytes of a row]."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).view(len(tensor), flat.numel() * tensor.element_size() // max(1, len(tensor)))


def patched(block: Block, patch: Block) -> Block:
    """A block with some rows replaced or added by those of a patch. Classes stay in ascending order."""
    labels = tuple(sorted({*block.labels, *patch.labels}))
    place = {label: row for row, label in enumerate((*block.labels, *patch.labels))}  # the later one counts
    index = torch.tensor([place[label] for label in labels], dtype=torch.long)
    tensors = {name: torch.cat([old, patch.tensors[name]])[index] for name, old in block.tensors.items()}
    return replace(patch, tensors=tensors, labels=labels)
