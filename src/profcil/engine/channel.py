"""The one door between clients and server: here payloads are filtered, metered and cut to what the receiver lacks.

`transfer = "changed"` sends a block only to a client that does not hold its current version, under whichever name, and
takes back only the blocks a turn has changed. `transfer = "full"` is the paper's accounting: all that the method names
goes down, the whole model comes up. The tensors a client works with are the same either way, and so is every result.
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
COUNT_BYTES = 8  # the number of examples behind a reply


@dataclass(frozen=True)
class When:
    """A place in the stream."""

    stage: str  # warmup, round or refresh
    position: int
    round: int
    rounds: int  # in this position

    @property
    def final(self) -> bool:
        return self.round == self.rounds - 1


class Parcel(dict[str, Block]):
    """What a client has in hand; `sent` names the part of it that it did not hold before."""

    sent: tuple[str, ...] = ()


@dataclass
class Door:
    ledger: Ledger
    transfer: str = "changed"
    kinds: frozenset[str] | None = None  # what the method has declared to send; None = anything
    filters: Sequence[Filter] = ()
    held: dict[int, dict[str, int]] = field(default_factory=dict)  # client → block → version it holds

    @contextmanager
    def round(self, clients: Sequence[int]) -> Iterator[None]:
        """A round counts as a whole or not at all: whatever breaks it off leaves the books as they were."""
        mark, before = len(self.ledger.entries), {c: self.held[c] for c in clients if c in self.held}
        try:
            yield
        except BaseException:
            del self.ledger.entries[mark:]
            for c in clients:
                self.held.pop(c, None)
            self.held.update(before)
            raise

    def down(self, client: int, state: ServerState, names: Sequence[str], when: When) -> Inbox:
        """What the client has in hand for its turn; the ledger sees what had to be sent for that."""
        wanted = {n: state.blocks[n] for n in names if n in state.blocks}
        holds = self.held.get(client, {})
        parcel = Parcel(wanted)
        lacking = (n for n, b in wanted.items() if b.version not in (holds.get(n), holds.get(b.origin)))
        parcel.sent = tuple(wanted if self.transfer == "full" else lacking)
        self._book(when, client, "down", [wanted[n] for n in parcel.sent], 0)
        self.held[client] = {**holds, **{n: b.version for n, b in wanted.items()}}  # a new one: copies share the old
        return parcel

    def up(self, inbox: Inbox, reply: Reply, when: When) -> Reply:
        """The reply as the server gets it; the client's private state stays behind."""
        for pass_through in self.filters:
            reply = pass_through(reply)
        unchanged = [b for n, b in inbox.items() if n in MODEL and n not in reply.blocks]
        whole_model = self.transfer == "full" and when.stage != "refresh"
        self._book(when, reply.client, "up", [*reply.blocks.values(), *(unchanged if whole_model else [])], COUNT_BYTES)
        return replace(reply, private=None)

    def _book(self, when: When, client: int, direction: str, blocks: Sequence[Block], extra: int) -> None:
        kinds: dict[str, int] = {}
        for block in blocks:
            if self.kinds is not None and block.kind not in self.kinds:
                declared = ", ".join(sorted(self.kinds))
                raise Failure(f"a block of kind '{block.kind}' came to the door; the method declares {declared}")
            kinds[block.kind] = kinds.get(block.kind, 0) + block.bytes
            kinds[HEADER] = kinds.get(HEADER, 0) + block.header_bytes
        if extra:
            kinds[HEADER] = kinds.get(HEADER, 0) + extra
        self.ledger.record(when.stage, when.position, when.round, client, direction, kinds)


def stored_bytes(blocks: Mapping[str, Block]) -> int:
    """Server memory beyond the model: what the method keeps between rounds, second copies of the model included."""
    return sum(b.bytes for name, b in blocks.items() if name not in MODEL)
