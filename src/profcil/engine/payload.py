"""What crosses between client and server, and what the server keeps: named blocks of tensors.

A block says what kind of thing it is (the ledger's word for it), which class ids its rows are about, and at which
tick of the server's clock it was last written. Methods write blocks; the clock, and so the versions, are kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from profcil.model.net import Weights

KINDS = ("model", "memory", "statistics", "transport", "replay", "generator", "prototype")


@dataclass(frozen=True)
class Block:
    """Tensors that travel and are replaced as one."""

    kind: str
    tensors: Mapping[str, Tensor]
    labels: tuple[int, ...] = ()
    version: int = 0
    origin: str = ""  # the block that this one was when it got a name of its own; they share the version

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def header_bytes(self) -> int:
        """Class ids travel as four bytes each; the paper's formulas leave them out, the ledger shows them apart."""
        return 4 * len(self.labels)


@dataclass(frozen=True)
class ServerState:
    """All that the server of a method knows between two rounds."""

    blocks: Mapping[str, Block] = field(default_factory=dict)
    clock: int = 0

    def put(self, **blocks: Block) -> ServerState:
        """The state with these blocks written, each under a new version."""
        fresh = {name: replace(b, version=self.clock + 1, origin="") for name, b in blocks.items()}
        return ServerState({**self.blocks, **fresh}, self.clock + 1)

    def also(self, **names: str) -> ServerState:
        """The state with blocks under further names, e.g. start="base". They stay what they are now, and whoever holds
        the one need not be sent the other."""
        again = {new: replace(self.blocks[name], origin=name) for new, name in names.items()}
        return replace(self, blocks={**self.blocks, **again})

    def drop(self, *names: str) -> ServerState:
        return replace(self, blocks={n: b for n, b in self.blocks.items() if n not in names})

    def put_weights(self, weights: Weights) -> ServerState:
        return self.put(**{name: Block("model", tensors) for name, tensors in weights.items()})

    def weights(self) -> Weights:
        return weights_of(self.blocks)

    def get(self, name: str) -> Block | None:
        return self.blocks.get(name)


Inbox = Mapping[str, Block]  # what a client has in hand: what was sent now, and what it held already


@dataclass(frozen=True)
class Reply:
    """What a client sends back: the blocks it changed or measured, and how many examples stand behind them."""

    client: int
    samples: int
    blocks: Mapping[str, Block] = field(default_factory=dict)
    private: Mapping[str, Tensor] | None = None  # the client's own memory for next time; never leaves it
    notes: Mapping[str, float | Tensor] = field(default_factory=dict)  # for the log; outside of a turn numbers only

    def weights(self) -> Weights:
        return weights_of(self.blocks)


def weights_of(blocks: Mapping[str, Block]) -> Weights:
    """The model blocks among some blocks."""
    return {name: dict(b.tensors) for name, b in blocks.items() if b.kind == "model"}
