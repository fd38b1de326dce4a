"""The progress table of a study: running and failed runs are at the top."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from profcil.cli import board as boards
from profcil.cli.board import Board, line_reporter, render_table


def cell(method: str, seed: int, applicable: bool = True) -> SimpleNamespace:
    train = SimpleNamespace(rounds=2, epochs=1)
    config = SimpleNamespace(dataset="digits", setting="severe", method=method, seed=seed, train=train, device="cpu")
    return SimpleNamespace(config=config, name=f"{method}{seed}", label=method, applicable=applicable)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    (tmp_path / "pro0").mkdir()
    facts = {"dataset": "digits", "method": "pro", "train.rounds": 2, "train.epochs": 1}
    (tmp_path / "pro0" / "run.json").write_text(json.dumps({"done": True, "seconds": 60.0, "config": facts}))
    cells = [cell("pro", 0), cell("pro", 1), cell("fedavg", 0), cell("hr", 0, applicable=False)]
    return Board(cells, tmp_path, jobs=1)


def test_finished_and_not_applicable_runs_are_known_from_the_start(board):
    assert board.heading() == "4 runs: 1 done, 2 waiting, 1 not applicable, about 0:02:00 left"


def test_running_and_failed_rows_come_first_and_show_the_position(board):
    _, _, avg, _ = board.cells
    assert [label for _, label, _ in board.rows()] == ["pro", "fedavg", "hr"]
    board.update(avg, "started")
    assert board.rows()[0] == ("digits severe", "fedavg", ["▶ warm-up"])
    (board.out / "fedavg0").mkdir()
    (board.out / "fedavg0" / "events.jsonl").write_text('{"event": "round", "position": 2, "round": 0}\n')
    assert board.rows()[0][2] == ["▶ position 3"]
    board.update(avg, "client 3 diverged")
    assert board.states["fedavg0"] == "failed" and board.rows()[0][2] == ["✗"]
    board.update(avg, "not applicable: made for graphs")
    assert board.states["fedavg0"] == "not applicable"
    assert board.rows()[0][1:] == ("pro", ["✓", "·"])


def test_a_small_screen_shows_how_many_lines_are_hidden(board):
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - rich needs a file
    board.cells = [*board.cells, *(cell(f"m{i}", 0) for i in range(20))]
    board.states |= {f"m{i}0": "waiting" for i in range(20)}
    console.print(render_table(board, height=9))
    text = console.export_text()
    assert "... and 20 more lines" in text and "24 runs" in text


def test_without_a_terminal_there_is_a_line_per_event(board, capsys):
    line_reporter(board)(board.cells[1], "started")
    assert capsys.readouterr().err.startswith("pro1: started (4 runs: 1 done, 1 running, 1 waiting")


def test_on_a_terminal_there_is_a_live_table(board, monkeypatch, capsys):
    monkeypatch.setattr(boards.sys.stderr, "isatty", lambda: True, raising=False)
    with boards.show_progress(board.cells, board.out, 1) as report:
        report(board.cells[2], "client 3 diverged")
    err = capsys.readouterr().err
    assert "fedavg0: client 3 diverged" in err and "1 failed" in err
