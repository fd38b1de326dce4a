"""The state of a run as flat tensors and plain values, the form in which state.safetensors stores it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores

if TYPE_CHECKING:  # the functions import torch and the engine when they are called
    import torch

    from profcil.engine.loop import RunState

COUNTERS = ("position", "round", "client_bytes", "server_bytes", "tally")


def pack(state: RunState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a state by flat names, and its plain values in a form that JSON can hold."""
    tensors: dict[str, torch.Tensor] = {}
    blocks: dict[str, list[Any]] = {}
    for name, block in state.server.blocks.items():
        tensors |= {f"server/{name}/{key}": tensor for key, tensor in block.tensors.items()}
        blocks[name] = [block.kind, list(block.labels), block.version, list(block.tensors), block.origin]
    in_memory, on_disk = split_private(state.private)
    for client, own in in_memory.items():
        tensors |= {f"client/{client}/{key}": tensor for key, tensor in own.items()}
    record: dict[str, Any] = {
        "blocks": blocks,
        "private": [[client, list(own)] for client, own in in_memory.items()],
        "parked": [[client, file] for client, file in on_disk.items()],
        "clock": state.server.clock,
        "held": [[client, versions] for client, versions in state.held.items()],
        "scores": state.scores.to_json(),
        "ledger": state.ledger.to_csv(),
    }
    for name in COUNTERS:
        record[name] = getattr(state, name)
    return tensors, record


def split_private(private: Any) -> tuple[Mapping[int, Any], Mapping[int, str]]:
    """The clients' private tensors that are in memory, and the names of the files that hold the others."""
    from profcil.engine.client_store import ClientStore

    if isinstance(private, ClientStore):
        return private.in_memory, private.in_files
    return private, {}


def unpack(
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
    device: torch.device,
    clients: Path = Path("clients"),
) -> RunState:
    """The inverse of `pack`. `clients` is the folder with the files of private tensors."""
    from profcil.engine.client_store import ClientStore
    from profcil.engine.loop import RunState
    from profcil.engine.payload import Block, ServerState

    def tensors_under(prefix: str, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: tensors[f"{prefix}/{name}"].to(device) for name in names}

    blocks = {}
    for name, (kind, labels, version, names, *origin) in record["blocks"].items():
        own = tensors_under(f"server/{name}", names)
        blocks[name] = Block(kind, own, tuple(labels), version, *origin)
    in_memory = {client: tensors_under(f"client/{client}", names) for client, names in record["private"]}
    in_files = dict(record.get("parked", []))
    held = {client: dict(versions) for client, versions in record["held"]}
    counters = {name: record[name] for name in COUNTERS}
    return RunState(
        server=ServerState(blocks, record["clock"]),
        scores=Scores.from_json(record["scores"]),
        ledger=Ledger.from_csv(record["ledger"]),
        held=held,
        private=ClientStore(clients, device, in_memory, in_files),
        **counters,
    )
