"""The table of a running study: what needs a look is on top, and what is known is shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from profcil.cli import board as boards
from profcil.cli.board import Board, plain, table


def cell(method: str, seed: int, applicable: bool = True) -> SimpleNamespace:
    train = SimpleNamespace(rounds=2, epochs=1)
    config = SimpleNamespace(dataset="digits", setting="severe", method=method, seed=seed, train=train)
    return SimpleNamespace(config=config, name=f"{method}{seed}", label=method, applicable=applicable)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    (tmp_path / "pro0").mkdir()
    facts = {"dataset": "digits", "method": "pro", "train.rounds": 2, "train.epochs": 1}
    (tmp_path / "pro0" / "run.json").write_text(json.dumps({"done": True, "seconds": 60.0, "config": facts}))
    todo = [cell("pro", 0), cell("pro", 1), cell("fedavg", 0), cell("hr", 0, applicable=False)]
    return Board(todo, tmp_path, jobs=1)


def test_what_is_there_and_what_does_not_fit_is_known_from_the_start(board):
    assert board.head() == "4 runs: 1 done, 2 waiting, 1 not applicable, about 0:02:00 left"


def test_running_and_failed_rows_come_first_and_positions_are_read_from_the_run(board):
    _, _, avg, _ = board.todo
    assert [label for _, label, _ in board.rows()] == ["pro", "fedavg", "hr"]
    board.hear(avg, "started")
    assert board.rows()[0] == ("digits severe", "fedavg", ["▶ warm-up"])
    (board.out / "fedavg0").mkdir()
    (board.out / "fedavg0" / "events.jsonl").write_text('{"event": "round", "position": 2, "round": 0}\n')
    assert board.rows()[0][2] == ["▶ position 3"]
    board.hear(avg, "client 3 diverged")
    assert board.states["fedavg0"] == "failed" and board.rows()[0][2] == ["✗"]
    board.hear(avg, "not applicable: made for graphs")
    assert board.states["fedavg0"] == "not applicable"
    assert board.rows()[0][1:] == ("pro", ["✓", "·"])


def test_a_small_screen_says_what_it_leaves_out(board):
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - rich needs a file
    board.todo = [*board.todo, *(cell(f"m{i}", 0) for i in range(20))]
    board.states |= {f"m{i}0": "waiting" for i in range(20)}
    console.print(table(board, height=9))
    text = console.export_text()
    assert "... and 20 more lines" in text and "24 runs" in text


def test_without_a_terminal_there_is_a_line_per_event(board, capsys):
    plain(board)(board.todo[1], "started")
    assert capsys.readouterr().err.startswith("pro1: started (4 runs: 1 done, 1 running, 1 waiting")


def test_a_terminal_gets_the_live_table(board, monkeypatch, capsys):
    monkeypatch.setattr(boards.sys.stderr, "isatty", lambda: True, raising=False)
    with boards.watching(board.todo, board.out, 1) as hear:
        hear(board.todo[2], "client 3 diverged")
    err = capsys.readouterr().err
    assert "fedavg0: client 3 diverged" in err and "1 failed" in err
