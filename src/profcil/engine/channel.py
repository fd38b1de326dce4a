"""The channel between clients and server: payloads are filtered and metered here, and unchanged blocks are left out.

`transfer = "changed"` sends a block only to a client that does not hold its current version, under its own or its
original name, and a client returns only the blocks that its turn has changed. `transfer = "full"` is the paper's
accounting: all blocks that the method names are sent, and the whole model is returned. Both settings give the same
results, because clients compute with the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from profcil.engine.payload import Block, Inbox, Reply, ServerState
from profcil.errors import Failure
from profcil.metrics.ledger import HEADER, Ledger
from profcil.model.net import MODEL

Filter = Callable[[Reply], Reply]  # noise, masking, minimum support: applied to what leaves a client
COUNT_BYTES = 8  # for the number of examples in a reply


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


class ClientBlocks(dict[str, Block]):
    """The blocks that a client computes with; `sent` names those that had to be sent to it."""

    sent: tuple[str, ...] = ()


@dataclass
class Channel:
    """The channel; it also knows which versions of blocks each client holds."""

    ledger: Ledger
    transfer: str = "changed"
    kinds: frozenset[str] | None = None  # the kinds of blocks that the method declares; None = all
    filters: Sequence[Filter] = ()
    held: dict[int, dict[str, int]] = field(default_factory=dict)  # client → block → version it holds

    @contextmanager
    def round(self, clients: Sequence[int]) -> Iterator[None]:
        """Makes a round atomic: if it fails or is interrupted, the ledger and the held versions are restored."""
        entries = len(self.ledger.entries)
        old_versions = {c: self.held[c] for c in clients if c in self.held}
        try:
            yield
        except BaseException:
            del self.ledger.entries[entries:]
            for c in clients:
                self.held.pop(c, None)
            self.held.update(old_versions)
            raise

    def down(self, client: int, state: ServerState, names: Sequence[str], when: When) -> Inbox:
        """The blocks that a client needs for its turn. The ledger counts those that have to be sent."""
        wanted = {n: state.blocks[n] for n in names if n in state.blocks}
        holds = self.held.get(client, {})
        missing = [n for n, b in wanted.items() if b.version not in (holds.get(n), holds.get(b.origin))]
        blocks_for_client = ClientBlocks(wanted)
        blocks_for_client.sent = tuple(wanted if self.transfer == "full" else missing)
        self._book(when, client, "down", [wanted[n] for n in blocks_for_client.sent], 0)
        versions = {n: b.version for n, b in wanted.items()}
        self.held[client] = {**holds, **versions}  # a new dict, because copies of the state share the old one
        return blocks_for_client

    def up(self, inbox: Inbox, reply: Reply, when: When) -> Reply:
        """The reply as the server receives it, without the client's private tensors."""
        for apply_filter in self.filters:
            reply = apply_filter(reply)
        returned = list(reply.blocks.values())
        if self.transfer == "full" and when.stage != "refresh":
            unchanged = [n for n in inbox if n in MODEL and n not in reply.blocks]
            returned += [inbox[n] for n in unchanged]
        self._book(when, reply.client, "up", returned, COUNT_BYTES)
        return replace(reply, private=None)

    def _book(self, when: When, client: int, direction: str, blocks: Sequence[Block], extra: int) -> None:
        """Adds the bytes of these blocks to the ledger, by kind."""
        kinds: dict[str, int] = {}
        for block in blocks:
            if self.kinds is not None and block.kind not in self.kinds:
                declared = ", ".join(sorted(self.kinds))
                raise Failure(
                    f"the method sends a block of kind '{block.kind}', but declares only {declared}; "
                    "add the kind to its `kinds`"
                )
            kinds[block.kind] = kinds.get(block.kind, 0) + block.bytes
            kinds[HEADER] = kinds.get(HEADER, 0) + block.header_bytes
        if extra:
            kinds[HEADER] = kinds.get(HEADER, 0) + extra
        self.ledger.record(when.stage, when.position, when.round, client, direction, kinds)


def stored_bytes(blocks: Mapping[str, Block]) -> int:
    """Server memory beyond the model: all other blocks, including further copies of the model."""
    return sum(b.bytes for name, b in blocks.items() if name not in MODEL)
