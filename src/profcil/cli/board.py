"""What a user sees while a study runs: a table of all its runs on a terminal, a line per event otherwise."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profcil.cli.progress import clock_time

WAITING, RUNNING, DONE, FAILED, MISFIT = "waiting", "running", "done", "failed", "not applicable"
FIRST = (RUNNING, FAILED, WAITING, DONE, MISFIT)  # whatever needs a look is on top
MARKS = {WAITING: "·", RUNNING: "▶", DONE: "✓", FAILED: "✗", MISFIT: "n/a"}


class Board:
    """The state of every run of a study."""

    def __init__(self, todo: Sequence[Any], out: Path, jobs: int) -> None:
        from profcil.studies.definition import finished
        from profcil.studies.scheduler import misfit

        self.todo, self.out, self.jobs = todo, out, jobs
        known = {c.name: DONE if finished(out, c) else MISFIT if misfit(out, c) else WAITING for c in todo}
        self.states: dict[str, str] = known

    def hear(self, cell: Any, what: str) -> None:
        states = {"started": RUNNING, "done": DONE}
        self.states[cell.name] = states.get(what, MISFIT if what.startswith(MISFIT) else FAILED)

    def head(self) -> str:
        """One line over everything."""
        counts = Counter(self.states.values())
        parts = [f"{counts[state]} {state}" for state in (DONE, RUNNING, WAITING, FAILED, MISFIT) if counts[state]]
        return f"{len(self.states)} runs: {', '.join(parts)}{self.left()}"

    def left(self) -> str:
        from profcil.studies.scheduler import expected

        missing = [c for c in self.todo if self.states[c.name] in (WAITING, RUNNING)]
        seconds, unknown = expected(missing, self.out, self.jobs)
        return f", about {clock_time(seconds)} left" if missing and not unknown else ""

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """A row per dataset, setting and labelled method, with a mark per seed; the liveliest first."""
        groups: dict[tuple[str, str], list[Any]] = {}
        for cell in self.todo:
            groups.setdefault((f"{cell.config.dataset} {cell.config.setting}", cell.label), []).append(cell)
        rows = [(place, label, [self.mark(c) for c in cells]) for (place, label), cells in groups.items()]
        rank = {key: min(FIRST.index(self.states[c.name]) for c in cells) for key, cells in groups.items()}
        return sorted(rows, key=lambda row: rank[row[0], row[1]])

    def mark(self, cell: Any) -> str:
        state = self.states[cell.name]
        if state != RUNNING:
            return MARKS[state]
        try:
            last = (self.out / cell.name / "events.jsonl").read_text().splitlines()[-1]
            position = last.split('"position": ')[1].split(",")[0]
            return f"{MARKS[RUNNING]} position {int(position) + 1}"
        except (OSError, IndexError, ValueError):
            return f"{MARKS[RUNNING]} warm-up"


@contextmanager
def watching(todo: Sequence[Any], out: Path, jobs: int) -> Iterator[Callable[[Any, str], None]]:
    """Who is told of every run that starts, ends or fails."""
    board = Board(todo, out, jobs)
    if not sys.stderr.isatty():
        yield plain(board)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(get_renderable=lambda: table(board, console.height), console=console, refresh_per_second=2):

        def hear(cell: Any, what: str) -> None:
            board.hear(cell, what)
            if board.states[cell.name] in (FAILED, MISFIT):
                console.print(f"{cell.name}: {what}", markup=False, highlight=False)

        yield hear


def plain(board: Board) -> Callable[[Any, str], None]:
    def hear(cell: Any, what: str) -> None:
        board.hear(cell, what)
        print(f"{cell.name}: {what} ({board.head()})", file=sys.stderr, flush=True)

    return hear


def table(board: Board, height: int) -> Any:
    """As much of the board as the screen holds."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows, room = board.rows(), max(3, height - 6)
    out = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("stream", "method", "seeds"):
        out.add_column(name)
    for place, label, marks in rows[:room]:
        out.add_row(Text(place), Text(label), Text("  ".join(marks)))
    if len(rows) > room:
        out.add_row(Text(f"... and {len(rows) - room} more lines"))
    return Group(Text(board.head()), out)
