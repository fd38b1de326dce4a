"""What a user sees while something runs: a bar with the time left on a terminal, sparse plain lines otherwise."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profcil.errors import ConfigError

SECONDS = 10.0  # between two plain lines
Observer = Callable[[Any], None]


@contextmanager
def watching(out: Path, *, quiet: bool = False, tensorboard: bool = False) -> Iterator[Observer]:
    """One observer for a run; it tells the screen and, when asked, TensorBoard."""
    with ExitStack() as stack:
        observers: list[Observer] = []
        if not quiet:
            observers.append(stack.enter_context(bar()) if sys.stderr.isatty() else Lines())
        if tensorboard:
            observers.append(stack.enter_context(scalars(out)))

        def observe(progress: Any) -> None:
            for each in observers:
                each(progress)

        yield observe


class Lines:
    """A plain line after every position, and one when nothing was said for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.stage, self.first = "", 0
        self.began = self.said = self.heard = clock()

    def __call__(self, p: Any) -> None:
        if p.when.stage != self.stage:  # the work before the first message of a stage belongs to it
            self.stage, self.began, self.first = p.when.stage, self.heard, p.done - 1
        self.heard = self.clock()
        if p.what == "position" or self.heard - self.said >= SECONDS:
            self.said = self.heard
            print(self.line(p), file=sys.stderr, flush=True)

    def line(self, p: Any) -> str:
        left = (self.heard - self.began) / max(1, p.done - self.first) * (p.total - p.done)
        return f"{label(p)}, {p.done} of {p.total} rounds, about {clock_time(left)} left"


def label(p: Any) -> str:
    if p.what == "warmup":
        return f"warm-up, loss {p.facts['loss']:.3g}"
    loss = f", loss {p.facts['loss']:.3g}" if p.facts.get("loss") is not None else " done"
    return f"position {p.when.position + 1} of {p.total // p.when.rounds}{loss}"


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def bar() -> Iterator[Observer]:
    """One bar for the warm-up and one for the stream; a resumed stream begins where it was."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as screen:
        tasks: dict[str, Any] = {}

        def observe(p: Any) -> None:
            if p.when.stage not in tasks:
                tasks[p.when.stage] = screen.add_task("", total=p.total, completed=p.done - 1)
            screen.update(tasks[p.when.stage], completed=p.done, description=label(p))

        yield observe


@contextmanager
def scalars(out: Path) -> Iterator[Observer]:
    """Losses by round and accuracies by position as TensorBoard events in the run folder."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard, which is not installed; "
            "get it with `pip install 'profcil[tensorboard]'` or leave the flag out"
        )
    with ExitStack() as stack:
        writers: list[Any] = []

        def observe(p: Any) -> None:
            if not writers:  # not before the run has its folder
                from torch.utils.tensorboard import SummaryWriter

                writers.append(SummaryWriter(str(out / "tensorboard")))
                stack.callback(writers[0].close)
            for name, value in readings(p, out):
                writers[0].add_scalar(name, value, p.done)

        yield observe


def readings(p: Any, out: Path) -> Iterator[tuple[str, float]]:
    """The scalars in one message; accuracies need the number of scored examples, which the run folder knows."""
    if p.facts.get("loss") is not None:
        yield f"{p.when.stage}/loss", p.facts["loss"]
        yield f"{p.when.stage}/clients", p.facts["clients"]
    if "correct" in p.facts:
        totals = json.loads((out / "scores.json").read_text(encoding="utf-8"))["total"]
        for task, (correct, total) in enumerate(zip(p.facts["correct"], totals, strict=True)):
            if correct >= 0 and total:
                yield f"accuracy/task{task}", correct / total


@contextmanager
def downloading() -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress of downloads, on a terminal as bars, else a line now and then."""
    if not sys.stderr.isatty():
        yield plain_download()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as screen:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int | None) -> None:
            task = tasks[name] if name in tasks else tasks.setdefault(name, screen.add_task(name, total=total))
            screen.update(task, completed=done, total=total)

        yield report


def plain_download(clock: Callable[[], float] = time.monotonic) -> Callable[[str, int, int | None], None]:
    said: dict[str, float] = {}

    def report(name: str, done: int, total: int | None) -> None:
        if done == total or clock() - said.setdefault(name, clock()) >= SECONDS:
            said[name] = clock()
            whole = f" of {total / 1e6:.1f}" if total else ""
            print(f"{name}: {done / 1e6:.1f}{whole} MB", file=sys.stderr, flush=True)

    return report
