"""What clients and server exchange, and the channel between them, which meters it. Noise is added before, at the
client (`privacy/`).

A block of tensors has a kind, under which the ledger counts it, the class ids of its rows, and a version. The version
is the time on the server's clock at which the block was last written. Methods write blocks; `ServerState` sets the
versions.

`transfer = "changed"` sends a block only to a client that does not hold its current version, under its own or its
original name, and a client returns only the blocks that its turn has changed. `transfer = "full"` is the paper's
accounting: all blocks that the method names are sent, and the whole model is returned. Both settings give the same
results, because clients compute with the same tensors.

The section [channel] of the settings makes messages smaller (`packing`). Blocks may be encoded: then both sides compute
with the decoded tensors, and the ledger counts the encoded ones. Of a memory, a client may be sent the rows that have
changed, or those of the classes nearest to its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from profcil.engine import encoding
from profcil.engine.packing import Packing
from profcil.errors import Failure
from profcil.metrics.ledger import HEADER, Ledger
from profcil.model.net import MODEL, Weights

KINDS = ("model", "memory", "statistics", "transport", "replay", "generator", "prototype")
COUNT_BYTES = 8  # for the number of examples in a reply
Coding = Mapping[str, str]  # kind of block → encoding, for the kinds that are encoded


@dataclass(frozen=True)
class Block:
    """Tensors that are sent and replaced together."""

    kind: str
    tensors: Mapping[str, Tensor]
    labels: tuple[int, ...] = ()
    version: int = 0
    origin: str = ""  # the block that this one was copied from, with the same version; see `also`
    row_bound: float = 0.0  # of a sum over examples: the largest norm of a row (`Client.bounded`); 0 = none is known

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def header_bytes(self) -> int:
        """The size of the class ids, four bytes each. The ledger counts them apart; the paper's formulas omit them."""
        return 4 * len(self.labels)

    def encoded(self, coding: Coding) -> Block:
        """The block as it is sent."""
        if self.kind not in coding:
            return self
        return replace(self, tensors=encoding.encoded(self.tensors, coding[self.kind], len(self.labels)))

    def decoded(self) -> Block:
        """The block as its receiver computes with it."""
        return replace(self, tensors=encoding.decoded(self.tensors))

    def rows(self, labels: Collection[int]) -> Block:
        """The block with the rows of some classes alone."""
        kept = [row for row, label in enumerate(self.labels) if label in labels]
        index = torch.tensor(kept, dtype=torch.long)
        tensors = {name: tensor[index.to(tensor.device)] for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, labels=tuple(self.labels[row] for row in kept))


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
        others = {n: b for n, b in self.blocks.items() if n not in names}
        return replace(self, blocks=others)

    def only(self, *names: str) -> ServerState:
        """The state with these blocks alone; a name without a block is left out."""
        kept = {n: b for n, b in self.blocks.items() if n in names}
        return replace(self, blocks=kept)

    def put_weights(self, weights: Weights) -> ServerState:
        """The state with these model blocks written."""
        blocks = {name: Block("model", tensors) for name, tensors in weights.items()}
        return self.put(**blocks)

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
    members: tuple[int, ...] = ()  # of a summed reply: the clients in the sum, of which `client` is the first

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that the reply is from."""
        return self.members or (self.client,)

    def weights(self) -> Weights:
        return weights_of(self.blocks)


def weights_of(blocks: Mapping[str, Block]) -> Weights:
    """The model blocks among some blocks."""
    return {name: dict(b.tensors) for name, b in blocks.items() if b.kind == "model"}


@dataclass(frozen=True)
class When:
    """A place in the stream."""

    stage: str  # warmup, dictionary, round or refresh
    position: int
    round: int
    rounds: int  # in this position

    @property
    def before_stream(self) -> bool:
        """Whether this is before the first position: all examples are current and no class counts as seen."""
        return self.stage in ("warmup", "dictionary")

    @property
    def final(self) -> bool:
        return self.round == self.rounds - 1


@dataclass
class Channel:
    """The channel; it also stores which versions of blocks each client holds."""

    ledger: Ledger
    transfer: str = "changed"
    kinds: frozenset[str] | None = None  # the kinds of blocks that the method declares; None = all
    held: dict[int, dict[str, int]] = field(default_factory=dict)  # client → block → version it holds
    dropped: dict[int, str] = field(default_factory=dict)  # clients whose replies were not used in this round, and why
    opposed: set[int] = field(default_factory=set)  # clients that ever had an update against the others (`robust`)
    pulled_back: list[int] = field(default_factory=list)  # those of them whose update was left out in this round
    facts: Counter[str] = field(default_factory=Counter)  # of the round, for the log
    packing: Packing = field(default_factory=Packing)

    @contextmanager
    def round(self, clients: Sequence[int]) -> Iterator[None]:
        """Makes a round atomic: if it fails or is interrupted, the ledger and the held versions are restored."""
        entries = len(self.ledger.entries)
        old_versions = {c: self.held[c] for c in clients if c in self.held}
        histories = dict(self.packing.histories or {})
        opposed = set(self.opposed)
        try:
            yield
        except BaseException:
            del self.ledger.entries[entries:]
            for c in clients:
                self.held.pop(c, None)
            self.held.update(old_versions)
            self.packing.restore(histories)
            self.opposed = opposed
            raise

    def down(self, client: int, state: ServerState, names: Sequence[str], when: When) -> Inbox:
        """The blocks that a client needs for its turn. The ledger counts those that have to be sent."""
        wanted, holds = self.packing.chosen(client, state, names, self.held.get(client, {}), when)
        missing = []
        for name, block in wanted.items():
            held = (holds.get(name), holds.get(block.origin))
            if block.version not in held:
                missing.append(name)
        blocks_for_client = self.packing.encode(wanted)
        blocks_for_client.sent = tuple(wanted if self.transfer == "full" else missing)
        blocks_for_client.patches = self.packing.patches(blocks_for_client.message(), holds)
        self.record(when, client, "down", self._sizes(list(blocks_for_client.message().values()), 0))
        versions = {n: b.version for n, b in wanted.items()}
        self.held[client] = {**holds, **versions}  # a new dict, because copies of the state share the old one
        return blocks_for_client

    def up(self, inbox: Inbox, reply: Reply, when: When) -> Reply:
        """The reply as the server receives it, without the client's private tensors."""
        received, sizes = self.packed(inbox, reply, when)
        self.record(when, reply.client, "up", sizes)
        return received

    def packed(self, inbox: Inbox, reply: Reply, when: When) -> tuple[Reply, dict[str, int]]:
        """The reply as the server receives it, and its bytes by kind. The ledger does not count them yet."""
        coding = self.packing.coding
        encoded = {n: b.encoded(coding) for n, b in reply.blocks.items()}
        returned = list(encoded.values())
        if self.transfer == "full" and when.stage != "refresh":
            unchanged = [n for n in inbox if n in MODEL and n not in reply.blocks]
            returned += [inbox[n].encoded(coding) for n in unchanged]
        received = {n: b.decoded() if b.kind in coding else b for n, b in encoded.items()}
        return replace(reply, blocks=received, private=None), self._sizes(returned, COUNT_BYTES)

    def _sizes(self, blocks: Sequence[Block], extra: int) -> dict[str, int]:
        """The bytes of these blocks, by kind."""
        kinds: dict[str, int] = {}
        for block in blocks:
            if self.kinds is not None and block.kind not in (*self.kinds, HEADER):
                declared = ", ".join(sorted(self.kinds))
                raise Failure(
                    f"the method sends a block of kind '{block.kind}', but declares only {declared}; "
                    "add the kind to its `kinds`"
                )
            kinds[block.kind] = kinds.get(block.kind, 0) + block.bytes
            kinds[HEADER] = kinds.get(HEADER, 0) + block.header_bytes
        if extra:
            kinds[HEADER] = kinds.get(HEADER, 0) + extra
        return kinds

    def record(self, when: When, client: int, direction: str, kinds: Mapping[str, int]) -> None:
        """Adds the bytes of one message to the ledger, by kind."""
        self.ledger.record(when.stage, when.position, when.round, client, direction, kinds)

    def take_facts(self) -> dict[str, float]:
        """The facts since the last call."""
        facts = {name: float(count) for name, count in self.facts.items()}
        self.facts.clear()
        return facts


def stored_bytes(blocks: Mapping[str, Block]) -> int:
    """Server memory beyond the model: all other blocks, including further copies of the model."""
    return sum(b.bytes for name, b in blocks.items() if name not in MODEL)
