"""The run folder: every file is complete at all times, one process writes at a time, reading needs no torch.

config.toml, plan.npz   the settings and the stream; written before anything is computed
state.safetensors       everything that resuming needs; it is decisive if the other files disagree with it. Of a long
                        ledger, and of many events, it has the end; the rest is in their files, with a digest here
states/                 earlier states, if the setting `keep_states` is above 0
clients/                private tensors of clients that do not fit in the state
scores.json, ledger.csv, run.json   parts of the state in readable form; rewritten with every state
model.safetensors       the trained model, which needs nothing else of the folder; written at the end of the run
data.npz, data.jsonl    the data, if it was given from Python
sites.toml              the federation and the folders of its sites, if the run simulates a deployment
logs/                   what loggers write (`--log`); no part of the run
events.jsonl            the events of the run; appended line by line, cut back to the state when a run is resumed

Saving copies the state. A background thread writes the copy while the run continues.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from profcil.errors import RunFolderError
from profcil.io.atomic_files import host_copies, json_bytes, read_tensors, write_bytes, write_host_tensors, write_text
from profcil.loggers.base import FOLDER as LOGS
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig, to_toml
from profcil.runs.digests import digest, with_digests
from profcil.runs.growing_file import SEAL_BYTES, GrowingFile
from profcil.runs.kept_states import KeptStates
from profcil.runs.state import pack, unpack

if TYPE_CHECKING:  # the engine, which imports torch, is imported when it is needed
    import torch

    from profcil.engine.run_state import RunState

LOCK_ATTEMPTS = 10
LOCK_PAUSE = 0.05  # seconds
NOTHING_SEALED = (0, digest(b""))
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
            hold(self.lock)
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
        self.ledger = GrowingFile(self.path / "ledger.csv")
        self.events = GrowingFile(self.path / "events.jsonl")
        self.written: Mapping[str, Any] = {}  # the plain values of the state on disk
        self.kept = KeptStates(self.path)
        self.keep_states = 0  # how many states at the ends of positions are kept
        self.remove_partial_files()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlocks the folder, and removes it if nothing but the lock was written."""
        self.writer.shutdown()
        if self.client_files is not None:
            self.remove_client_files_except([*self.client_files, *self.kept.client_files()])
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
        foreign = sorted(names - {*FIRST_FILES, *DATA_FILES, LOGS})
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

    def save_plan(self, plan: Plan) -> None:
        """Writes the plan of a run that has grown."""
        with self.explain_write_errors(f"continue with `profcil resume {self.path}`"):
            plan.save(self.path / "plan.npz")

    def save(self, state: RunState, events: str, facts: Mapping[str, Any]) -> None:
        """Copies the state and starts to write the copy. Waits for the previous write first."""
        self.wait_until_written()
        tensors, record = pack(state)
        record |= {"events": events, "facts": dict(facts)}
        if self.ledger.sealed or self.events.sealed:
            record["sealed"] = {"ledger": self.ledger.mark, "events": self.events.mark}
        if self.client_files is not None:
            self.remove_client_files_except([*self.client_files, *client_files_of(record), *self.kept.client_files()])
        self.pending_write = self.writer.submit(self.write, host_copies(tensors), record)

    def seal(self) -> tuple[int, int]:
        """Seals a long ledger and many events as far as they are in the state on disk. Returns how many entries and how
        many characters of the events were sealed."""
        self.wait_until_written()
        ledger = str(self.written.get("ledger", ""))
        events = str(self.written.get("events", ""))
        is_private = "privacy" in self.written.get("facts", {})  # what it has spent is counted from the whole ledger
        self.written = {}  # nothing is sealed twice
        with self.explain_write_errors(f"continue with `profcil resume {self.path}`"):
            entries = 0
            if len(ledger) > SEAL_BYTES and not is_private:
                self.ledger.seal(ledger_end(ledger, self.ledger))
                entries = ledger.count("\n") - 1
            if len(events) <= SEAL_BYTES:
                return entries, 0
            self.events.seal(events.encode())
            return entries, len(events)

    def write(self, tensors: dict[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Writes the state, then the readable files."""
        advice = "free some space, then start it again with the same command"
        if self.has_state:
            advice = f"the last saved state is complete, continue with `profcil resume {self.path}`"
        with self.explain_write_errors(advice):
            write_host_tensors(self.path / "state.safetensors", tensors, record)
            self.client_files = client_files_of(record)
            if self.keep_states and record["position"] and not record["round"]:
                self.kept.keep(record["position"], self.keep_states, self.client_files)
            self.write_readable_files(record)
            self.written = record

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
        scores = json_bytes(record["scores"])
        ledger = ledger_end(record["ledger"], self.ledger)
        events = record["events"].encode()
        write_bytes(self.path / "scores.json", scores)
        self.ledger.write_end(ledger)
        digests: dict[str, Any] = {"scores.json": digest(scores), "ledger.csv": self.ledger.digest_with(ledger)}
        # A run appends to its events between two states, so their digest is that of a beginning.
        digests["events.jsonl"] = [self.events.sealed + len(events), self.events.digest_with(events)]
        facts = with_digests({**record["facts"], **progress}, digests)
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
            self.ledger.restore(sealed_part(record, "ledger"))
            self.events.restore(sealed_part(record, "events"))
        except (KeyError, ValueError, TypeError, AttributeError):
            raise RunFolderError(
                f"{self.path}/state.safetensors is missing or damaged; start the run again with another --out"
            ) from None
        with self.explain_write_errors(f"free some space, then continue with `profcil resume {self.path}`"):
            self.write_readable_files(record)
            self.events.write_end(events.encode())
        self.client_files = client_files_of(record)
        self.written = record
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


def hold(lock: IO[str]) -> None:
    """Locks a file for this process. Tries again for an instant: a reader may be looking whether it is locked."""
    for _ in range(LOCK_ATTEMPTS - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(LOCK_PAUSE)
    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def ledger_end(text: str, ledger: GrowingFile) -> bytes:
    """The part of ledger.csv that a state holds. After a sealed beginning it has no line with the columns."""
    return (text.partition("\n")[2] if ledger.sealed else text).encode()


def sealed_part(record: Mapping[str, Any], name: str) -> list[Any]:
    """The mark of the sealed beginning of a file in a state."""
    return list(record.get("sealed", {}).get(name, NOTHING_SEALED))


def client_files_of(record: Mapping[str, Any]) -> list[str]:
    """The names of the files in clients/ that a state refers to."""
    return list(dict(record["parked"]).values())
