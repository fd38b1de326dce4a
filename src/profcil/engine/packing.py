"""The blocks that are sent to a client: which rows of the memory, in which encoding, and without rows that it holds.

These are the settings of the section [channel]; by default a block is sent whole and as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from profcil.engine.changed_rows import RowHistory, has_rows, updated
from profcil.engine.nearest_classes import CHOICE, NearestClasses
from profcil.errors import ConfigError

if TYPE_CHECKING:
    from profcil.engine.channel import Block, Coding, ServerState, When
    from profcil.engine.world import World
    from profcil.resolve import RunConfig

Versions = dict[str, int]  # block → version that a client holds


class ClientBlocks(dict[str, "Block"]):
    """The blocks that a client computes with; `sent` names those that had to be sent to it.

    `encoded` has the blocks that are sent in another form than the client computes with, `patches` those of which only
    some rows are sent, in that form.
    """

    def __init__(self, blocks: Mapping[str, Block], encoded: Mapping[str, Block]) -> None:
        super().__init__(blocks)
        self.sent: tuple[str, ...] = ()
        self.encoded = encoded
        self.patches: Mapping[str, Block] = {}

    def message(self) -> dict[str, Block]:
        """The blocks as they are sent."""
        forms = {**self, **self.encoded, **self.patches}
        return {name: forms[name] for name in self.sent}

    def whole(self) -> ClientBlocks:
        """The same, with all blocks sent whole, for a client of which it is unknown what it holds."""
        complete = ClientBlocks(self, self.encoded)
        complete.sent = tuple(self)
        return complete


@dataclass
class Packing:
    """How blocks are made smaller. The histories are part of a run's state."""

    coding: Coding = field(default_factory=dict)
    histories: dict[str, RowHistory] | None = None  # block → its rows when it was last sent; None = not tracked
    nearest: NearestClasses | None = None  # which rows of the memory a client is sent; None = all
    forms: dict[str, tuple[Block, Block, Block]] = field(default_factory=dict)  # as stored, as sent, as received

    def chosen(
        self, client: int, state: ServerState, names: Sequence[str], holds: Versions, when: When
    ) -> tuple[dict[str, Block], Versions]:
        """The blocks of these names with the rows that a client is sent, and the versions that it holds: of the memory
        none, if it holds other rows."""
        wanted = {n: state.blocks[n] for n in names if n in state.blocks}
        if self.nearest is None:
            return wanted, holds
        memories = self.nearest.memories
        labels = self.nearest.choose(client, state.blocks, when)
        wanted |= {name: wanted[name].rows(labels) for name in memories if name in wanted}
        key = self.nearest.key(state.blocks, when)
        if holds.get(CHOICE) == key:
            return wanted, holds
        others = {name: version for name, version in holds.items() if name not in memories}
        return wanted, {**others, CHOICE: key}

    def encode(self, wanted: Mapping[str, Block]) -> ClientBlocks:
        """The blocks as the client computes with them, and as they are sent."""
        plain = dict(wanted)
        encoded = {}
        for name, block in wanted.items():
            if block.kind in self.coding:
                encoded[name], plain[name] = self.both_forms(name, block)
        return ClientBlocks(plain, encoded)

    def both_forms(self, name: str, block: Block) -> tuple[Block, Block]:
        """A block as it is sent and as it is received, computed once for all receivers."""
        known = self.forms.get(name)
        if known is None or known[0] is not block:
            encoded = block.encoded(self.coding)
            known = (block, encoded, encoded.decoded())
            self.forms[name] = known
        return known[1:]

    def patches(self, message: Mapping[str, Block], holds: Versions) -> dict[str, Block]:
        """The rows that a client lacks, of the blocks of which it has an older version."""
        found: dict[str, Block] = {}
        if self.histories is None:
            return found
        for name, block in message.items():
            if not has_rows(block):
                continue
            history = updated(self.histories.get(name), block)
            self.histories[name] = history
            labels = history.missing(holds[name]) if name in holds else None
            if labels is not None:
                found[name] = block.rows(labels)
        return found

    def restore(self, histories: Mapping[str, RowHistory]) -> None:
        """Sets the histories back to what they were."""
        if self.histories is not None:
            self.histories.clear()
            self.histories.update(histories)


def make_packing(world: World, method: Any, histories: dict[str, RowHistory]) -> Packing:
    """How a run makes blocks smaller, by the settings of its channel."""
    settings = world.config.channel
    tracked = histories if settings.rows == "changed" else None
    if not settings.nearest:
        return Packing(settings.coding, tracked)
    nearest = NearestClasses(settings.nearest, method.class_memories, world.config.seed, world.observed)
    return Packing(settings.coding, tracked, nearest)


def check_channel(config: RunConfig, method: Any) -> None:
    """Refuses settings of the channel that have no effect, or that cannot be combined with others."""
    settings = config.channel
    for kind, encoding in settings.coding.items():
        if kind not in method.kinds:
            raise ConfigError(f"channel.{kind} = {encoding}, but {config.method} sends no {kind}; leave it out")
        if kind in method.exact_kinds:
            raise ConfigError(
                f"channel.{kind} = {encoding}, but {config.method} needs its {kind} in float32; leave it out"
            )
    if settings.nearest and not method.class_memories:
        raise ConfigError(f"channel.nearest is set, but {config.method} broadcasts no memory by class; leave it out")
    if settings.rows == "changed" and "memory" not in method.kinds:
        raise ConfigError(f"channel.rows = changed, but {config.method} broadcasts no memory by class; leave it out")
    if settings.rows == "changed" and config.transfer == "full":
        raise ConfigError('channel.rows = changed sends parts of blocks, transfer = "full" whole ones; set one of them')
    replies = settings.coding.keys() - {"memory"}
    if config.privacy.secure_sum and (replies or settings.nearest):
        name = "nearest" if settings.nearest else min(replies)
        raise ConfigError(
            f"privacy.secure_sum adds fixed-point numbers of the same blocks from all clients, which channel.{name} "
            "changes; leave out one of them"
        )
