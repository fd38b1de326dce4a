"""Runs the cells of a study, several processes at a time.

Every run has its own process, so a crash, a memory peak or an interrupt affects that run only. Processes are forked
from a server that has imported torch but not used it, so they start quickly. The measured peak memory of a run does
not include library pages that only the import touched: `profcil run` reports about 50 MB more.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Lock, Thread
from types import ModuleType

from profcil.config import OWN
from profcil.io.atomic_files import write_text
from profcil.io.interrupts import stop_signals_as_interrupt
from profcil.resolve import to_toml
from profcil.runs.run_files import is_locked
from profcil.studies.definition import Cell, is_finished

Report = Callable[[Cell, str], None]  # gets a cell and "started", "done" or an error message
Command = Callable[[list[str]], int]  # runs a command line and returns its exit status
NOT_APPLICABLE = "not applicable"
INTERRUPTED = 130
SAVE_SECONDS = 60.0  # the longest time that an interrupted run may need to save


def run_cells(
    cells: Sequence[Cell], out: Path, data_dir: Path, jobs: int, diagnose: bool, report: Report, command: Command
) -> int:
    """Runs the cells that are not finished, `jobs` at a time, and diagnoses them if asked; the number of failures.

    `command` runs a command line of profcil. It must be importable by name, because other processes call it.
    """
    scheduler = Scheduler(out, data_dir, jobs, diagnose, report, command)
    by_name = {cell.name: cell for cell in cells if cell.applicable}  # two variants may share a run
    with stop_signals_as_interrupt(), ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(scheduler.run_cell, cell) for cell in by_name.values()]
        try:
            return sum(not future.result() for future in futures)
        except KeyboardInterrupt:
            scheduler.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            done = sum(is_finished(out, cell) for cell in by_name.values())
            raise KeyboardInterrupt(
                f"interrupted; {done} of {len(by_name)} runs are done and the others were saved, "
                "continue with the same command"
            ) from None


class Scheduler:
    """Starts the processes of a study and can stop them."""

    def __init__(self, out: Path, data_dir: Path, jobs: int, diagnose: bool, report: Report, command: Command) -> None:
        self.out = out
        self.data_dir = data_dir
        self.jobs = jobs
        self.diagnose = diagnose
        self.report = report
        self.command = command
        self.processes: set[BaseProcess] = set()
        self.stopped = Event()
        self.starting = Lock()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["profcil.engine.run"])

    def run_cell(self, cell: Cell) -> bool:
        """Runs one cell and diagnoses it; False if either failed."""
        folder = self.out / cell.name
        if not is_finished(self.out, cell):
            self.report(cell, "started")
            self.wait_for_lock(folder / "lock")
            status = self.call(cell, self.run_arguments(cell, folder))
            if status != 0:
                return status is None
        if self.diagnose and not (folder / "diagnostics.json").exists():
            arguments = ["diagnose", str(folder), "--data-dir", str(self.data_dir), "--json"]
            if self.call(cell, arguments) != 0:
                return False
        self.report(cell, "done")
        return True

    def wait_for_lock(self, lock: Path) -> None:
        """Waits until a run of a killed study has saved and released its folder."""
        deadline = time.monotonic() + SAVE_SECONDS
        while is_locked(lock) and time.monotonic() < deadline and not self.stopped.is_set():
            time.sleep(0.2)

    def run_arguments(self, cell: Cell, folder: Path) -> list[str]:
        """The command line that resumes a run with a saved state, or starts a new one."""
        data_flag = "--data" if cell.config.dataset == OWN else "--data-dir"
        common = [data_flag, str(self.data_dir), "--quiet", "--json"]
        if (folder / "state.safetensors").exists():
            return ["resume", str(folder), *common]
        recipe = self.out / f"{cell.name}.toml"
        write_text(recipe, to_toml(cell.config))
        one_worker = ["--set", "workers=1"] if self.jobs > 1 else []
        return ["run", str(recipe), "--out", str(folder), *common, *one_worker]

    def call(self, cell: Cell, arguments: list[str]) -> int | None:
        """Runs a command line in its own process; the exit status.

        None if the method is not applicable or the study was stopped. The output is in a log file beside the run
        folder; the file is deleted on success.
        """
        if self.stopped.is_set():
            return None
        log = self.out / f"{cell.name}.log"
        log.write_text("")  # ends the study with an error if the folder cannot be written
        status = self.run_process(arguments, log)
        if status == 0:
            log.unlink(missing_ok=True)
            return 0
        if self.stopped.is_set() and status in (INTERRUPTED, -signal.SIGINT):
            return None
        message = read_last_line(log) or f"ended with status {status}"
        self.report(cell, message)
        return None if message.startswith(NOT_APPLICABLE) else status

    def run_process(self, arguments: list[str], log: Path) -> int:
        """Starts a process and waits for it; the exit status.

        The process sends its exit status through a pipe: multiprocessing may lose it when several threads wait.
        """
        receiver, sender = self.context.Pipe(duplex=False)
        inputs = (self.command, arguments, str(log), dict(os.environ), sender)
        process = self.context.Process(target=run_in_child, args=inputs)
        self.start(process)
        sender.close()
        self.processes.add(process)
        process.join()
        self.processes.discard(process)
        with receiver:
            try:
                return receiver.recv()
            except EOFError:  # the process was killed
                return process.exitcode or -signal.SIGKILL

    def start(self, process: BaseProcess) -> None:
        """Starts a process without the caller's main module: a script without `if __name__ == "__main__"` would be
        executed in it again."""
        with self.starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                process.start()
            finally:
                sys.modules["__main__"] = main

    def stop(self) -> None:
        """Starts no further process, and interrupts the running ones so that they save and end."""
        self.stopped.set()
        for process in list(self.processes):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)


def run_in_child(
    command: Command, arguments: list[str], log: str, environment: dict[str, str], sender: Connection
) -> None:
    """In a child process: runs a command line with its output in a log file.

    The child has its own process group, so Ctrl-C in the terminal reaches the study only. The study forwards it once;
    a second signal could interrupt the child while it saves.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    Thread(target=interrupt_when_parent_ends, daemon=True).start()
    os.environ.update(environment)  # the fork server may have been started with another environment
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = command(arguments)
    with suppress(OSError):  # the study may have been killed
        sender.send(status)
    sys.exit(status)


def interrupt_when_parent_ends() -> None:
    """Interrupts this process when the study is killed, so that the run saves and ends as on Ctrl-C."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGINT)


def read_last_line(log: Path) -> str:
    """The last line of a log: the message that a command ended with."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("profcil: ") if lines else ""


def is_not_applicable(out: Path, cell: Cell) -> bool:
    """Whether the method does not support the cell: known beforehand, or from the log of the run."""
    return not cell.applicable or read_last_line(out / f"{cell.name}.log").startswith(NOT_APPLICABLE)
