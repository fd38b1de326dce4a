"""What clients and server exchange, and what the server stores: named blocks of tensors.

A block has a kind, under which the ledger counts it, the class ids of its rows, and a version. The version is the time
on the server's clock at which the block was last written. Methods write blocks; this module sets the versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from profcil.model.net import Weights

KINDS = ("model", "memory", "statistics", "transport", "replay", "generator", "prototype")


@dataclass(frozen=True)
class Block:
    """Tensors that are sent and replaced together."""

    kind: str
    tensors: Mapping[str, Tensor]
    labels: tuple[int, ...] = ()
    version: int = 0
    origin: str = ""  # the block that this one was copied from, with the same version; see `also`

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def header_bytes(self) -> int:
        """The size of the class ids, four bytes each. The ledger counts them apart; the paper's formulas omit them."""
        return 4 * len(self.labels)


@dataclass(frozen=True)
class ServerState:
    """Everything that the server of a method stores between two rounds."""

    blocks: Mapping[str, Block] = field(default_factory=dict)
    clock: int = 0

    def put(self, **blocks: Block) -> ServerState:
        """The state with these blocks written, each under a new version."""
        clock = self.clock + 1
        written = {name: replace(block, version=clock, origin="") for name, block in blocks.items()}
        return ServerState({**self.blocks, **written}, clock)

    def also(self, **names: str) -> ServerState:
        """The state with copies of blocks under further names, e.g. start="base". A copy does not change when its
        original is replaced. A client that holds the original is not sent the copy."""
        copies = {new: replace(self.blocks[name], origin=name) for new, name in names.items()}
        return replace(self, blocks={**self.blocks, **copies})

    def drop(self, *names: str) -> ServerState:
        """The state without these blocks."""
        return replace(self, blocks={n: b for n, b in self.blocks.items() if n not in names})

    def only(self, *names: str) -> ServerState:
        """The state with these blocks alone; a name without a block is left out."""
        return replace(self, blocks={n: b for n, b in self.blocks.items() if n in names})

    def put_weights(self, weights: Weights) -> ServerState:
        """The state with these model blocks written."""
        return self.put(**{name: Block("model", tensors) for name, tensors in weights.items()})

    def weights(self) -> Weights:
        return weights_of(self.blocks)

    def get(self, name: str) -> Block | None:
        return self.blocks.get(name)


Inbox = Mapping[str, Block]  # the blocks that a client computes with: those sent now and those it held already


@dataclass(frozen=True)
class Reply:
    """What a client returns: the blocks that it changed or measured, and the number of examples used for them."""

    client: int
    samples: int
    blocks: Mapping[str, Block] = field(default_factory=dict)
    private: Mapping[str, Tensor] | None = None  # stays on the client, for its next turn
    notes: Mapping[str, float | Tensor] = field(default_factory=dict)  # for the log; numbers once the turn has ended

    def weights(self) -> Weights:
        return weights_of(self.blocks)


def weights_of(blocks: Mapping[str, Block]) -> Weights:
    """The model blocks among some blocks."""
    return {name: dict(b.tensors) for name, b in blocks.items() if b.kind == "model"}
