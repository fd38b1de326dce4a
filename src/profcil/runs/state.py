"""The state of a run as flat tensors and plain values, the form in which state.safetensors stores it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.runs.arrivals_state import pack_arrivals, unpack_arrivals

if TYPE_CHECKING:  # the functions import torch and the engine when they are called
    import torch

    from profcil.engine.channel import ServerState
    from profcil.engine.run_state import RunState

COUNTERS = ("position", "round", "client_bytes", "server_bytes", "tally")


def pack(state: RunState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a state by flat names, and its plain values in a form that JSON can hold."""
    tensors, blocks = pack_server(state.server)
    in_memory, on_disk = split_private(state.private)
    for client, own in in_memory.items():
        tensors |= {f"client/{client}/{key}": tensor for key, tensor in own.items()}
    record: dict[str, Any] = {"blocks": blocks}
    record["private"] = [[client, list(own)] for client, own in in_memory.items()]
    record["parked"] = [[client, file] for client, file in on_disk.items()]
    record["clock"] = state.server.clock
    record["held"] = [[client, versions] for client, versions in state.held.items()]
    record["strikes"] = list(state.strikes.items())
    record["scores"] = state.scores.to_json()
    record["ledger"] = state.ledger.to_csv()
    if state.ledger.sealed_bytes:
        record["sealed_bytes"] = state.ledger.sealed_bytes
    if state.opposed:
        record["opposed"] = list(state.opposed)
    for name in COUNTERS:
        record[name] = getattr(state, name)
    if state.stopping:
        record["stopping"] = state.stopping
    if state.row_histories:
        record["row_histories"] = {name: history.to_json() for name, history in state.row_histories.items()}
    if state.arrivals:
        arriving, record["arrivals"] = pack_arrivals(state.arrivals)
        tensors |= arriving
    return tensors, record


def pack_server(server: ServerState) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """The tensors of the server's blocks by flat names, and what else there is to know about each block."""
    tensors: dict[str, torch.Tensor] = {}
    blocks: dict[str, list[Any]] = {}
    for name, block in server.blocks.items():
        tensors |= {f"server/{name}/{key}": tensor for key, tensor in block.tensors.items()}
        blocks[name] = [block.kind, list(block.labels), block.version, list(block.tensors), block.origin]
    return tensors, blocks


def unpack_server(
    tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, list[Any]], clock: int, device: torch.device
) -> ServerState:
    """The inverse of `pack_server`."""
    from profcil.engine.channel import Block, ServerState

    found = {}
    for name, (kind, labels, version, names, *origin) in blocks.items():
        own = {key: tensors[f"server/{name}/{key}"].to(device) for key in names}
        found[name] = Block(kind, own, tuple(labels), version, *origin)
    return ServerState(found, clock)


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
    from profcil.engine.changed_rows import RowHistory
    from profcil.engine.client_store import ClientStore
    from profcil.engine.run_state import RunState

    def tensors_under(prefix: str, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: tensors[f"{prefix}/{name}"].to(device) for name in names}

    in_memory = {client: tensors_under(f"client/{client}", names) for client, names in record["private"]}
    in_files = dict(record.get("parked", []))
    held = {client: dict(versions) for client, versions in record["held"]}
    counters = {name: record[name] for name in COUNTERS}
    return RunState(
        server=unpack_server(tensors, record["blocks"], record["clock"], device),
        scores=Scores.from_json(record["scores"]),
        ledger=Ledger(Ledger.from_csv(record["ledger"]).entries, record.get("sealed_bytes", 0)),
        held=held,
        strikes=dict(record.get("strikes", [])),
        opposed=tuple(record.get("opposed", ())),
        private=ClientStore(clients, device, in_memory, in_files),
        stopping=dict(record.get("stopping", {})),
        row_histories={name: RowHistory.from_json(v) for name, v in record.get("row_histories", {}).items()},
        arrivals=unpack_arrivals(tensors, record["arrivals"], device) if "arrivals" in record else None,
        **counters,
    )
