"""The run folder: every file is complete at all times, one process writes at a time, reading needs no torch.

config.toml, plan.npz   the settings and the stream; written before anything is computed
state.safetensors       everything that resuming needs; it is decisive if the other files disagree with it
clients/                private tensors of clients that do not fit in the state
scores.json, ledger.csv, run.json   parts of the state in readable form; rewritten with every state
model.safetensors       the trained model, which needs nothing else of the folder; written at the end of the run
data.npz, data.jsonl    the data, if it was given from Python
sites.toml              the federation and the folders of its sites, if the run simulates a deployment
events.jsonl            the events of the run; appended line by line, cut back to the state when a run is resumed

Saving copies the state. A background thread writes the copy while the run continues.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.errors import RunFolderError
from profcil.io.atomic_files import host_copies, json_bytes, read_tensors, write_bytes, write_host_tensors, write_text
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig, to_toml
from profcil.runs.digests import with_digests
from profcil.runs.state import pack, unpack

if TYPE_CHECKING:  # the engine, which imports torch, is imported when it is needed
    import torch

    from profcil.engine.loop import RunState

OTHER_BYTES = 20_000_000  # disk space for everything that is not tensors
FIRST_FILES = ("lock", "config.toml", "plan.npz", "events.jsonl")  # written before the first state
DATA_FILES = ("data.npz", "data.jsonl", "sites.toml")  # data that was given from Python, or where sites have theirs
FILES = (*FIRST_FILES, "state.safetensors", "scores.json", "ledger.csv", "run.json", "model.safetensors")


class RunFolder:
    """A run folder that is open for writing. It is locked until it is closed or its process ends."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a+")  # noqa: SIM115 - stays open as long as the run
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise RunFolderError(
                f"run folder {path} is in use by another process; wait until that ends or choose another folder"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"run folder {path} cannot be written ({error.strerror}); choose another with --out"
            ) from None
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self.pending_write: Future[None] | None = None
        self.client_files: list[str] | None = None  # files in clients/ that the state on disk needs; None: unknown
        self.remove_partial_files()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlocks the folder, and removes it if nothing but the lock was written."""
        self.writer.shutdown()
        if self.client_files is not None:
            self.remove_client_files_except(self.client_files)
        if [file.name for file in self.path.iterdir()] == ["lock"]:
            (self.path / "lock").unlink()
            self.path.rmdir()
        self.lock.close()

    @property
    def clients(self) -> Path:
        return self.path / "clients"

    @property
    def has_state(self) -> bool:
        """Whether a state was saved. A folder without one can be started again without loss."""
        return any((self.path / name).exists() for name in ("state.safetensors", "scores.json"))

    def remove_partial_files(self) -> None:
        """Removes incomplete files of a process that was killed while writing."""
        for name in FILES:
            for part in (*self.path.glob(f".{name}.*.part"), *self.path.glob(f"{name}.*.part")):
                part.unlink(missing_ok=True)

    def remove_client_files_except(self, needed: Iterable[str]) -> None:
        from profcil.engine.client_store import sweep

        sweep(self.clients, needed)

    def check_new(self) -> None:
        """Refuses a folder that holds another run, or files that do not belong to a run."""
        if self.has_state:
            raise RunFolderError(
                f"run folder {self.path} already holds a run; use `profcil resume {self.path}` or another --out"
            )
        names = {file.name for file in self.path.iterdir()}
        foreign = sorted(names - {*FIRST_FILES, *DATA_FILES})
        if not foreign and "plan.npz" not in names:  # a run writes plan.npz before config.toml
            foreign = sorted(names & {"config.toml"})
        if foreign:
            raise RunFolderError(
                f"{self.path} holds {foreign[0]}, which does not belong to a run; choose another --out"
            )

    def check_space(self, tensor_bytes: int) -> None:
        """Refuses a disk that is too full, before training starts. The old and the new state must both fit."""
        needed = 3 * tensor_bytes + OTHER_BYTES
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise RunFolderError(
                f"run folder {self.path} is on a disk with {free / 1e6:.0f} MB free, but the run needs up to "
                f"{needed / 1e6:.0f} MB; free some space or choose another --out"
            )

    def begin(self, config: RunConfig, plan: Plan, events: str = "") -> None:
        """Writes settings, plan and the events so far."""
        with self.explain_write_errors("nothing was computed yet, free some space or choose another --out"):
            plan.save(self.path / "plan.npz")
            write_text(self.path / "config.toml", to_toml(config))
            write_text(self.path / "events.jsonl", events)

    def save(self, state: RunState, events: str, facts: Mapping[str, Any]) -> None:
        """Copies the state and starts to write the copy. Waits for the previous write first."""
        self.wait_until_written()
        tensors, record = pack(state)
        record |= {"events": events, "facts": dict(facts)}
        if self.client_files is not None:
            self.remove_client_files_except([*self.client_files, *client_files_of(record)])
        self.pending_write = self.writer.submit(self.write, host_copies(tensors), record)

    def write(self, tensors: dict[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Writes the state, then the readable files."""
        advice = "free some space, then start it again with the same command"
        if self.has_state:
            advice = f"the last saved state is complete, continue with `profcil resume {self.path}`"
        with self.explain_write_errors(advice):
            write_host_tensors(self.path / "state.safetensors", tensors, record)
            self.client_files = client_files_of(record)
            self.write_readable_files(record)

    def wait_until_written(self) -> None:
        """Waits for the background write, and raises its error if it failed."""
        if self.pending_write is not None:
            error = self.pending_write.exception()  # an interrupt here leaves the write pending
            self.pending_write = None
            if error is not None:
                raise error

    def write_readable_files(self, record: Mapping[str, Any]) -> None:
        """Writes scores.json, ledger.csv and run.json from the values of a state. run.json has the others' digests."""
        progress = {name: record[name] for name in ("position", "round")}
        files = {"scores.json": json_bytes(record["scores"]), "ledger.csv": record["ledger"].encode()}
        for name, data in files.items():
            write_bytes(self.path / name, data)
        facts = with_digests({**record["facts"], **progress}, files, record["events"].encode())
        write_bytes(self.path / "run.json", json_bytes(facts))

    def load(self, device: torch.device) -> tuple[RunState, str, dict[str, Any]]:
        """The saved state, its events and facts.

        The other files are rewritten to match the state: a crash may have left them ahead of it or behind it.
        """
        self.wait_until_written()
        if not self.has_state:
            raise RunFolderError(
                f"run folder {self.path} has no state yet, because its run ended during the warm-up or before; "
                f"start it again with the same `profcil run` command"
            )
        try:
            tensors, record = read_tensors(self.path / "state.safetensors") or ({}, {})
            state = unpack(tensors, record, device, self.clients)
            events = str(record["events"])
            facts = dict(record["facts"])
        except (KeyError, ValueError, TypeError, AttributeError):
            raise RunFolderError(
                f"{self.path}/state.safetensors is missing or damaged; start the run again with another --out"
            ) from None
        with self.explain_write_errors(f"free some space, then continue with `profcil resume {self.path}`"):
            self.write_readable_files(record)
            write_text(self.path / "events.jsonl", events)
        self.client_files = client_files_of(record)
        return state, events, facts

    def append(self, line: str) -> None:
        """Appends one event to events.jsonl."""
        with (
            self.explain_write_errors(f"the last saved state is complete, continue with `profcil resume {self.path}`"),
            open(self.path / "events.jsonl", "a", encoding="utf-8") as file,
        ):
            file.write(line)

    @contextmanager
    def explain_write_errors(self, advice: str) -> Iterator[None]:
        """Turns an OSError into a RunFolderError that ends with `advice`."""
        try:
            yield
        except OSError as error:
            raise RunFolderError(f"run folder {self.path} could not be written ({error.strerror}); {advice}") from None


def client_files_of(record: Mapping[str, Any]) -> list[str]:
    """The names of the files in clients/ that a state refers to."""
    return list(dict(record["parked"]).values())
