"""The runs of a study, several processes at a time.

Every run is a process of its own, so that a crash, a peak of memory or an interrupt is that run's alone. Processes are
forked from a server that has imported torch and never used it: they start at once. Their peak memory is their own, all
measured in the same way; pages of libraries that only the import touched are not in it, so `profcil run` alone shows
some 50 MB more.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

from profcil.io.atomic_files import write_text
from profcil.io.interrupts import ended_by_a_scheduler
from profcil.resolve import to_toml
from profcil.runs.reader import is_locked
from profcil.studies.definition import Cell, finished, read_json

Tell = Callable[[Cell, str], None]
Command = Callable[[list[str]], int]  # runs a command line and returns its exit status
NOT_APPLICABLE = "not applicable"
INTERRUPTED = 130
SAVING = 60.0  # seconds that an interrupted run may need to save


def play(todo: Sequence[Cell], out: Path, data: Path, jobs: int, diagnose: bool, tell: Tell, command: Command) -> int:
    """Runs what is not there yet, `jobs` at a time, and diagnoses where asked; the number of failures."""
    crew = Crew(out, data, jobs, diagnose, tell, command)
    each = {cell.name: cell for cell in todo if cell.applicable}  # two variants may share a run
    with ended_by_a_scheduler(), ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(crew.one, cell) for cell in each.values()]
        try:
            return sum(not future.result() for future in work)
        except KeyboardInterrupt:
            crew.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            there = sum(finished(out, cell) for cell in each.values())
            raise KeyboardInterrupt(
                f"interrupted; {there} of {len(each)} runs are done and the others keep what they have, "
                "go on with the same command"
            ) from None


class Crew:
    """Whoever is at work, and how to stop them."""

    def __init__(self, out: Path, data: Path, jobs: int, diagnose: bool, tell: Tell, main: Command) -> None:
        self.out, self.data, self.jobs, self.diagnose, self.tell, self.main = out, data, jobs, diagnose, tell, main
        self.alive: set[BaseProcess] = set()
        self.stopped = Event()
        self.start = multiprocessing.get_context("forkserver")
        self.start.set_forkserver_preload(["profcil.engine.run"])

    def one(self, cell: Cell) -> bool:
        """One run, and a look at it; False where it failed."""
        folder = self.out / cell.name
        if not finished(self.out, cell):
            self.tell(cell, "started")
            self.await_release(folder / "lock")
            if (ended := self.call(cell, self.command(cell, folder))) != 0:
                return ended is None
        elsewhere = ["diagnose", str(folder), "--data-dir", str(self.data), "--json"]
        looked = not self.diagnose or (folder / "diagnostics.json").exists() or self.call(cell, elsewhere) == 0
        if looked:
            self.tell(cell, "done")
        return looked

    def await_release(self, lock: Path) -> None:
        """A run of a study that was killed a moment ago may still be saving."""
        until = time.monotonic() + SAVING
        while is_locked(lock) and time.monotonic() < until and not self.stopped.is_set():
            time.sleep(0.2)

    def command(self, cell: Cell, folder: Path) -> list[str]:
        """Resume what was begun; start what was not."""
        more = ["--data-dir", str(self.data), "--quiet", "--json"]
        if (folder / "state.safetensors").exists():  # the one file that a run is picked up from
            return ["resume", str(folder), *more]
        recipe = self.out / f"{cell.name}.toml"
        write_text(recipe, to_toml(cell.config))
        alone = ["--set", "workers=1"] if self.jobs > 1 else []
        return ["run", str(recipe), "--out", str(folder), *more, *alone]

    def call(self, cell: Cell, line: list[str]) -> int | None:
        """A command line in a process of its own: its exit status, or None where the method does not fit or the
        study was stopped. What it said is kept beside the run until it goes well."""
        if self.stopped.is_set():
            return None
        said = self.out / f"{cell.name}.log"
        said.write_text("")  # where that is not possible the study ends with a sentence
        ended = self.wait(line, said)
        if ended == 0:
            said.unlink(missing_ok=True)
            return 0
        if self.stopped.is_set() and ended in (INTERRUPTED, -signal.SIGINT):
            return None
        words = last_words(said) or f"ended with status {ended}"
        self.tell(cell, words)
        return None if words.startswith(NOT_APPLICABLE) else ended

    def wait(self, line: list[str], said: Path) -> int:
        """Starts a process and waits for it. It tells its exit status itself: where several threads look after
        processes, multiprocessing may lose one."""
        here, there = self.start.Pipe(duplex=False)
        process = self.start.Process(target=work, args=(self.main, line, str(said), dict(os.environ), there))
        process.start()
        there.close()
        self.alive.add(process)
        process.join()
        self.alive.discard(process)
        with here:
            try:
                return here.recv()
            except EOFError:  # it was killed
                return process.exitcode or -signal.SIGKILL

    def stop(self) -> None:
        """Lets every process save and end; nothing new is begun."""
        self.stopped.set()
        for process in list(self.alive):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)


def work(main: Command, line: list[str], said: str, surroundings: dict[str, str], tell: Connection) -> None:
    """In a child: a command line whose words go to a file. The terminal's Ctrl-C is for the study, which hands it on
    once; a second one could hit a run while it saves."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    Thread(target=end_with_the_study, daemon=True).start()
    os.environ.update(surroundings)  # the server that forked us may be older than they are
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = main(line)
    with suppress(OSError):  # nobody may be left to hear it
        tell.send(status)
    sys.exit(status)


def end_with_the_study() -> None:
    """Beside a run: where the study is killed and cannot hand anything on, the run saves and ends as on Ctrl-C."""
    if (study := multiprocessing.parent_process()) is not None:
        study.join()
        os.kill(os.getpid(), signal.SIGINT)


def last_words(said: Path) -> str:
    """The sentence a command ended with."""
    try:
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("profcil: ") if lines else ""


def misfit(out: Path, cell: Cell) -> bool:
    """Whether the run said that its method does not fit."""
    return not cell.applicable or last_words(out / f"{cell.name}.log").startswith(NOT_APPLICABLE)


def expected(missing: Iterable[Cell], out: Path, jobs: int = 1) -> tuple[float, int]:
    """Seconds that the missing runs would take, and how many of them nothing is known about.

    Speed is measured: seconds per round and local epoch of finished runs in this folder, of the same dataset and method
    or else of the same dataset. Warm-ups, which runs share, are not in it.
    """
    speeds = measured(out)
    found = [speeds.get((c.config.dataset, c.config.method), speeds.get((c.config.dataset, ""))) for c in missing]
    times = [
        speed * cell.config.train.rounds * cell.config.train.epochs
        for cell, speed in zip(missing, found, strict=True)
        if speed is not None
    ]
    return sum(times) / jobs, found.count(None)


def measured(out: Path) -> dict[tuple[str, str], float]:
    """Mean seconds per round and epoch by dataset and method, and by dataset alone under an empty method."""
    seen: dict[tuple[str, str], list[float]] = {}
    for path in sorted(out.glob("*/run.json")):
        facts = read_json(path)
        with suppress(LookupError, TypeError, AttributeError, ArithmeticError):  # a damaged one tells nothing
            if facts.get("done"):
                c = facts["config"]
                speed = facts["seconds"] / (c["train.rounds"] * c["train.epochs"])
                for key in ((c["dataset"], c["method"]), (c["dataset"], "")):
                    seen.setdefault(key, []).append(speed)
    return {key: fmean(values) for key, values in seen.items()}
