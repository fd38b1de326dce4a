"""A run folder: complete at every moment, held by one process at a time, readable without torch.

config.toml, plan.npz   what the run is; written before anything is computed
state.safetensors       all that is needed to go on, and the truth if anything disagrees
clients/                what clients keep for themselves, where that is more than a state should hold
scores.json, ledger.csv, run.json   the same in readable form, rewritten with every state
events.jsonl            what happened; grows line by line, and is cut back to the state where a run is resumed

A state is copied when it is saved, and written while the run goes on.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from profcil.engine.client_store import Parked, sweep
from profcil.engine.loop import RunState
from profcil.engine.payload import Block, ServerState
from profcil.errors import RunFolderError
from profcil.io.atomic_files import copies, read_tensors, write_copies, write_json, write_text
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig, to_toml

SLACK = 20_000_000  # bytes for everything that is not tensors
BEGUN = ("lock", "config.toml", "plan.npz", "events.jsonl")  # what lies there before a first state
FILES = (*BEGUN, "state.safetensors", "scores.json", "ledger.csv", "run.json")


class RunFolder:
    """Opens a folder for writing and holds its lock until closed; the lock of a process that died is void."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held for the life of the run
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise RunFolderError(
                f"run folder {path} is in use by another process; wait for it or choose another"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"run folder {path} cannot be written ({error.strerror}); choose another with --out"
            ) from None
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self.under_way: Future[None] | None = None  # a state that is being written
        self.parked: list[str] | None = None  # files of clients that the state on the disk needs, as far as known
        self.sweep()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the folder; one in which nothing was begun, because of a mistake, does not stay behind."""
        self.writer.shutdown()
        if self.parked is not None:
            sweep(self.clients, self.parked)
        if [f.name for f in self.path.iterdir()] == ["lock"]:
            (self.path / "lock").unlink()
            self.path.rmdir()
        self.lock.close()

    def sweep(self) -> None:
        """Removes what a killed process was in the middle of writing."""
        for name in FILES:
            for part in (*self.path.glob(f".{name}.*.part"), *self.path.glob(f"{name}.*.part")):
                part.unlink(missing_ok=True)

    @property
    def started(self) -> bool:
        """Whether there is anything to lose: a folder without a first state can be started again."""
        return any((self.path / name).exists() for name in ("state.safetensors", "scores.json"))

    def check_new(self) -> None:
        """A folder that holds another run is refused, and so is one with files that are no run's."""
        if self.started:
            raise RunFolderError(
                f"run folder {self.path} already holds a run; use `profcil resume {self.path}` or another --out"
            )
        there = {p.name for p in self.path.iterdir()}
        strange = sorted(there - {*BEGUN}) or sorted(there & {"config.toml"} if "plan.npz" not in there else ())
        if strange:
            raise RunFolderError(f"{self.path} holds {strange[0]}, which is not of a run; choose another --out")

    def begin(self, config: RunConfig, plan: Plan, events: str = "") -> None:
        """Writes what the run is, and what has happened so far."""
        with self.writing("nothing was computed yet, make room or choose another --out"):
            plan.save(self.path / "plan.npz")
            write_text(self.path / "config.toml", to_toml(config))
            write_text(self.path / "events.jsonl", events)

    def check_space(self, tensors: int) -> None:
        """A full disk is an error before training, not after: two states must fit."""
        need, free = 3 * tensors + SLACK, shutil.disk_usage(self.path).free
        if free < need:
            raise RunFolderError(
                f"run folder {self.path} lies on a disk with {free / 1e6:.0f} MB free, but the run needs up to "
                f"{need / 1e6:.0f} MB; make room or choose another --out"
            )

    def save(self, state: RunState, events: str, facts: Mapping[str, Any]) -> None:
        """Takes a copy of the state and begins to write it; the one before is whole by then."""
        self.settle()
        tensors, record = pack(state)
        record |= {"events": events, "facts": dict(facts)}
        if self.parked is not None:
            sweep(self.clients, [*self.parked, *dict(record["parked"]).values()])
        self.under_way = self.writer.submit(self.write, copies(tensors), record)

    def write(self, tensors: dict[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """The state first; the readable files follow it."""
        go_on = f"the last saved state is whole, continue with `profcil resume {self.path}`"
        with self.writing(go_on if self.started else "make room, then start it again with the same command"):
            write_copies(self.path / "state.safetensors", tensors, record)
            self.parked = list(dict(record["parked"]).values())
            self.publish(record)

    def settle(self) -> None:
        """Waits until the last state is written, and tells if it could not be."""
        if self.under_way is not None:
            trouble = self.under_way.exception()  # whoever is interrupted here has not waited
            self.under_way = None
            if trouble is not None:
                raise trouble

    @property
    def clients(self) -> Path:
        return self.path / "clients"

    def publish(self, record: Mapping[str, Any]) -> None:
        """The readable files, as the state has them."""
        write_json(self.path / "scores.json", record["scores"])
        write_text(self.path / "ledger.csv", record["ledger"])
        write_json(self.path / "run.json", {**record["facts"], **{k: record[k] for k in ("position", "round")}})

    def load(self, device: torch.device) -> tuple[RunState, str, dict[str, Any]]:
        """The saved state, its events and facts. The readable files are set back to it: what was written after it
        will happen again, and what a crash left unwritten is made up for."""
        self.settle()
        if not self.started:
            raise RunFolderError(
                f"run folder {self.path} has no state yet, its run ended during the warm-up or before; "
                f"start it again with the same `profcil run` command"
            )
        try:
            tensors, record = read_tensors(self.path / "state.safetensors") or ({}, {})
            state = unpack(tensors, record, device, self.clients)
            found = str(record["events"]), dict(record["facts"])
        except (KeyError, ValueError, TypeError, AttributeError):
            raise RunFolderError(
                f"{self.path}/state.safetensors is missing or damaged; start the run again with another --out"
            ) from None
        with self.writing(f"make room, then continue with `profcil resume {self.path}`"):
            self.publish(record)
            write_text(self.path / "events.jsonl", record["events"])
        self.parked = list(dict(record["parked"]).values())
        return state, *found

    def append(self, line: str) -> None:
        """One more event, for whoever watches the file while the run goes on."""
        with (
            self.writing(f"the last saved state is whole, continue with `profcil resume {self.path}`"),
            open(self.path / "events.jsonl", "a", encoding="utf-8") as file,
        ):
            file.write(line)

    @contextmanager
    def writing(self, advice: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFolderError(f"run folder {self.path} could not be written ({error.strerror}); {advice}") from None


def pack(state: RunState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state as flat tensors and plain values."""
    tensors = {f"server/{n}/{k}": t for n, b in state.server.blocks.items() for k, t in b.tensors.items()}
    near, away = (p.near, p.away) if isinstance(p := state.private, Parked) else (p, {})
    tensors |= {f"client/{c}/{k}": t for c, own in near.items() for k, t in own.items()}
    return tensors, {
        "blocks": {
            n: [b.kind, list(b.labels), b.version, list(b.tensors), b.origin] for n, b in state.server.blocks.items()
        },
        "private": [[c, list(own)] for c, own in near.items()],
        "parked": [[c, file] for c, file in away.items()],
        "clock": state.server.clock,
        "held": [[c, h] for c, h in state.held.items()],
        "scores": state.scores.to_json(),
        "ledger": state.ledger.to_csv(),
        **{k: getattr(state, k) for k in ("position", "round", "client_bytes", "server_bytes", "tally")},
    }


def unpack(
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
    device: torch.device,
    clients: Path = Path("clients"),
) -> RunState:
    """What `pack` took apart; `clients` is the folder of what is parked."""

    def under(place: str, names: list[str]) -> dict[str, torch.Tensor]:
        return {k: tensors[f"{place}/{k}"].to(device) for k in names}

    blocks = {
        name: Block(kind, under(f"server/{name}", names), tuple(labels), version, *origin)
        for name, (kind, labels, version, names, *origin) in record["blocks"].items()
    }
    near = {c: under(f"client/{c}", names) for c, names in record["private"]}
    return RunState(
        server=ServerState(blocks, record["clock"]),
        scores=Scores.from_json(record["scores"]),
        ledger=Ledger.from_csv(record["ledger"]),
        held={c: dict(h) for c, h in record["held"]},
        private=Parked(clients, device, near, dict(record.get("parked", []))),
        **{k: record[k] for k in ("position", "round", "client_bytes", "server_bytes", "tally")},
    )
