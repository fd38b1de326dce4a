"""The progress of a study: on a terminal a live table of all runs, otherwise one line for each event."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profcil.cli.progress import clock_time
from profcil.errors import count

WAITING = "waiting"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
NOT_APPLICABLE = "not applicable"
COUNTED = (DONE, RUNNING, WAITING, FAILED, NOT_APPLICABLE)  # the order in the heading
ROW_ORDER = (RUNNING, FAILED, WAITING, DONE, NOT_APPLICABLE)  # running and failed runs are at the top
MARKS = {WAITING: "·", RUNNING: "▶", DONE: "✓", FAILED: "✗", NOT_APPLICABLE: "n/a"}
Report = Callable[[Any, str], None]  # gets a cell and "started", "done" or an error message


class Board:
    """The state of every run of a study."""

    def __init__(self, cells: Sequence[Any], out: Path, jobs: int) -> None:
        self.cells = cells
        self.out = out
        self.jobs = jobs
        self.states = {cell.name: initial_state(out, cell) for cell in cells}

    def update(self, cell: Any, event: str) -> None:
        """Records an event of a run: "started", "done" or an error message."""
        if event == "started":
            state = RUNNING
        elif event == "done":
            state = DONE
        elif event.startswith(NOT_APPLICABLE):
            state = NOT_APPLICABLE
        else:
            state = FAILED
        self.states[cell.name] = state

    def heading(self) -> str:
        """The number of runs in each state, and the time left."""
        counts = Counter(self.states.values())
        parts = [f"{counts[state]} {state}" for state in COUNTED if counts[state]]
        return f"{count(len(self.states), 'run')}: {', '.join(parts)}{self.time_left()}"

    def time_left(self) -> str:
        """The expected time left, with a leading comma; empty if it is unknown."""
        from profcil.studies.estimates import estimate_seconds

        missing = [cell for cell in self.cells if self.states[cell.name] in (WAITING, RUNNING)]
        seconds, unknown = estimate_seconds(missing, self.out, self.jobs)
        return f", about {clock_time(seconds)} left" if missing and not unknown else ""

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """Stream, method and one mark for each seed; rows with running or failed runs first."""
        groups: dict[tuple[str, str], list[Any]] = {}
        for cell in self.cells:
            stream = f"{cell.config.dataset} {cell.config.setting}"
            groups.setdefault((stream, cell.label), []).append(cell)
        ordered = sorted(groups.items(), key=lambda group: self.rank(group[1]))
        rows = []
        for (stream, label), cells in ordered:
            marks = [self.mark(cell) for cell in cells]
            rows.append((stream, label, marks))
        return rows

    def rank(self, cells: Sequence[Any]) -> int:
        return min(ROW_ORDER.index(self.states[cell.name]) for cell in cells)

    def mark(self, cell: Any) -> str:
        """The symbol of a run's state; for a running one also its position."""
        state = self.states[cell.name]
        if state != RUNNING:
            return MARKS[state]
        try:
            last_event = (self.out / cell.name / "events.jsonl").read_text().splitlines()[-1]
            position = last_event.split('"position": ')[1].split(",")[0]
            return f"{MARKS[RUNNING]} position {int(position) + 1}"
        except (OSError, IndexError, ValueError):
            return f"{MARKS[RUNNING]} warm-up"


def initial_state(out: Path, cell: Any) -> str:
    """The state of a run before the study starts."""
    from profcil.studies.definition import is_finished
    from profcil.studies.scheduler import is_not_applicable

    if is_finished(out, cell):
        return DONE
    return NOT_APPLICABLE if is_not_applicable(out, cell) else WAITING


@contextmanager
def show_progress(cells: Sequence[Any], out: Path, jobs: int) -> Iterator[Report]:
    """Yields a function that the scheduler calls for every run that starts, ends or fails."""
    board = Board(cells, out, jobs)
    if not sys.stderr.isatty():
        yield line_reporter(board)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(get_renderable=lambda: render_table(board, console.height), console=console, refresh_per_second=2):

        def report(cell: Any, event: str) -> None:
            board.update(cell, event)
            if board.states[cell.name] in (FAILED, NOT_APPLICABLE):
                console.print(f"{cell.name}: {event}", markup=False, highlight=False)

        yield report


def line_reporter(board: Board) -> Report:
    """A reporter that prints one line for each event."""

    def report(cell: Any, event: str) -> None:
        board.update(cell, event)
        print(f"{cell.name}: {event} ({board.heading()})", file=sys.stderr, flush=True)

    return report


def render_table(board: Board, height: int) -> Any:
    """The table, cut to the height of the screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = board.rows()
    shown = max(3, height - 6)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("stream", "method", "seeds"):
        table.add_column(name)
    for stream, label, marks in rows[:shown]:
        table.add_row(Text(stream), Text(label), Text("  ".join(marks)))
    if len(rows) > shown:
        table.add_row(Text(f"... and {len(rows) - shown} more lines"))
    return Group(Text(board.heading()), table)
