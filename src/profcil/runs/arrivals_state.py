"""Replies on their way, as flat tensors and plain values: the part of a saved state that runs with clocks have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from profcil.protocol.clocks import ClockState, Pending

if TYPE_CHECKING:  # the functions import torch and the engine when they are called
    import torch

    from profcil.engine.arrivals import Arrivals, Parcel
    from profcil.engine.channel import Block


def pack_arrivals(arrivals: Arrivals) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors by flat names, and the plain values. The models that turns started from are stored once, under their
    version."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, block in named_blocks(arrivals):
        tensors |= {f"{prefix}/{key}": tensor for key, tensor in block.tensors.items()}
    parcels = [[*key, describe_parcel(parcel)] for key, parcel in arrivals.parcels.items()]
    measured = list(arrivals.measured.items())
    return tensors, {"clock": asdict(arrivals.clock), "parcels": parcels, "measured": measured}


def named_blocks(arrivals: Arrivals) -> Iterator[tuple[str, Block]]:
    """All blocks with the prefix of their tensors."""
    for key, parcel in arrivals.parcels.items():
        for name, block in parcel.reply.blocks.items():
            yield f"{prefix_of(key)}/{name}", block
        for name, block in parcel.start.items():
            yield f"start/{name}/{block.version}", block


def prefix_of(key: Sequence[object]) -> str:
    """The beginning of the names of a reply's tensors."""
    return "/".join(["arriving", *map(str, key)])


def describe_parcel(parcel: Parcel) -> dict[str, Any]:
    """Everything of a parcel but its tensors."""
    reply = parcel.reply
    return {
        "samples": reply.samples,
        "notes": dict(reply.notes),
        "sizes": dict(parcel.sizes),
        "when": asdict(parcel.when),
        "version": parcel.version,
        "blocks": {name: describe_block(block) for name, block in reply.blocks.items()},
        "start": {name: describe_block(block) for name, block in parcel.start.items()},
    }


def describe_block(block: Block) -> list[Any]:
    """Everything of a block but its tensors, and their names."""
    return [block.kind, list(block.labels), block.version, block.origin, block.row_bound, list(block.tensors)]


def unpack_arrivals(tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], device: torch.device) -> Arrivals:
    """The inverse of `pack_arrivals`."""
    from profcil.engine.arrivals import Arrivals, Parcel
    from profcil.engine.channel import Block, Reply, When

    def block_at(prefix: str, described: list[Any]) -> Block:
        kind, labels, version, origin, row_bound, names = described
        own = {name: tensors[f"{prefix}/{name}"].to(device) for name in names}
        return Block(kind, own, tuple(labels), version, origin, row_bound)

    parcels = {}
    for *key, known in record["parcels"]:
        client, what, update = key
        blocks = {name: block_at(f"{prefix_of(key)}/{name}", d) for name, d in known["blocks"].items()}
        start = {name: block_at(f"start/{name}/{d[2]}", d) for name, d in known["start"].items()}
        reply = Reply(client, known["samples"], blocks, notes=known["notes"])
        parcels[client, what, update] = Parcel(reply, known["sizes"], When(**known["when"]), known["version"], start)
    measured = {label: position for label, position in record["measured"]}
    return Arrivals(unpack_clock(record["clock"]), parcels, measured)


def unpack_clock(values: Mapping[str, Any]) -> ClockState:
    """A clock's state from plain values."""
    pending = tuple(Pending(**each) for each in values["pending"])
    tuples = {name: tuple(values[name]) for name in ("replied", "asked")}
    owing = tuple((client, round) for client, round in values["owing"])
    return ClockState(**{**values, **tuples, "pending": pending, "owing": owing})
