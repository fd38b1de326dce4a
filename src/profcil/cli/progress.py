"""Progress of runs and downloads: a bar with the time left on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from profcil.cli.parser import print_warning
from profcil.loggers.base import Logger
from profcil.loggers.observer import log_observer

INTERVAL = 10.0  # seconds between two plain lines
Observer = Callable[[Any], None]
DownloadObserver = Callable[[str, int, int | None], None]  # file name, bytes done, bytes in all


@contextmanager
def run_observer(out: Path, loggers: Sequence[Logger] = (), *, quiet: bool = False) -> Iterator[Observer]:
    """The observer of a run. It shows progress on stderr and calls the loggers."""
    with ExitStack() as stack:
        observers: list[Observer] = []
        if not quiet:
            observers.append(stack.enter_context(progress_bar()) if sys.stderr.isatty() else Lines())
        observers.append(stack.enter_context(log_observer(loggers, out, print_warning)))

        def observe(progress: Any) -> None:
            for each in observers:
                each(progress)

        yield observe


class Lines:
    """Prints a plain line after every position, and one if none was printed for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.stage = ""
        self.done_before = 0  # rounds of this stage that an earlier session has done
        now = clock()
        self.stage_start = now
        self.last_print = now
        self.last_message = now

    def __call__(self, p: Any) -> None:
        if p.when.stage != self.stage:  # a stage starts with the last message of the one before
            self.stage = p.when.stage
            self.stage_start = self.last_message
            self.done_before = p.done - 1
        self.last_message = self.clock()
        if p.what == "position" or self.last_message - self.last_print >= INTERVAL:
            self.last_print = self.last_message
            print(self.line(p), file=sys.stderr, flush=True)

    def line(self, p: Any) -> str:
        seconds_per_round = (self.last_message - self.stage_start) / max(1, p.done - self.done_before)
        left = seconds_per_round * (p.total - p.done)
        return f"{label(p)}{results(p)}, {p.done} of {p.total} rounds, about {clock_time(left)} left"


def label(p: Any) -> str:
    """Stage or position, and the loss if it is known."""
    loss = f", loss {p.facts['loss']:.3g}" if p.facts.get("loss") is not None else " done"
    if p.what == "warmup":
        return f"warm-up{loss}"
    if p.what == "dictionary":
        return "dictionary"
    return f"position {p.when.position + 1} of {p.total // p.when.rounds}{loss}"


def results(p: Any) -> str:
    """FAA, CTA and AF so far, and the bytes sent; empty except after a position."""
    if not p.so_far:
        return ""
    metrics = [f"{name.upper()} {p.so_far[name]:.1f}" for name in ("faa", "cta", "af")]
    return f": {', '.join(metrics)}, {p.so_far['bytes'] / 1e6:.1f} MB sent"


def clock_time(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def progress_bar() -> Iterator[Observer]:
    """One bar for the warm-up and one for the stream, with the time left and the FAA so far.

    After every position a line of results stays above the bar. A resumed stream starts at its last round.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as screen:
        tasks: dict[str, Any] = {}
        latest = ""

        def observe(p: Any) -> None:
            nonlocal latest
            if p.when.stage not in tasks:
                tasks[p.when.stage] = screen.add_task("", total=p.total, completed=p.done - 1)
            if p.so_far:
                latest = f", FAA {p.so_far['faa']:.1f}"
                screen.console.print(f"{label(p)}{results(p)}", markup=False, highlight=False)
            screen.update(tasks[p.when.stage], completed=p.done, description=f"{label(p)}{latest}")

        yield observe


@contextmanager
def download_observer() -> Iterator[DownloadObserver]:
    """The observer of downloads: bars on a terminal, else plain lines."""
    if not sys.stderr.isatty():
        yield plain_download()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as screen:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = screen.add_task(name, total=total)
            screen.update(tasks[name], completed=done, total=total)

        yield report


def plain_download(clock: Callable[[], float] = time.monotonic) -> DownloadObserver:
    """Prints a plain line at the end of a file, and now and then before."""
    last_print: dict[str, float] = {}

    def report(name: str, done: int, total: int | None) -> None:
        if done == total or clock() - last_print.setdefault(name, clock()) >= INTERVAL:
            last_print[name] = clock()
            of_total = f" of {total / 1e6:.1f}" if total else ""
            print(f"{name}: {done / 1e6:.1f}{of_total} MB", file=sys.stderr, flush=True)

    return report
