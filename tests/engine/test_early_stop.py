"""Early stopping: which rounds are skipped, by which data, and that a resumed run ends with the same bits."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run_interrupted import press_ctrl_c
from tiny_runs import at_call, outcome, tiny

from profcil.cli.main import main
from profcil.engine import early_stop, run
from profcil.engine.world import make_world
from profcil.model.net import MODEL
from profcil.resolve import RunConfig, resolve, to_toml


def rounds_played(folder: Path) -> dict[int, list[int]]:
    """The rounds in the ledger, by position."""
    with open(folder / "ledger.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] == "round"]
    played: dict[int, set[int]] = {}
    for row in rows:
        played.setdefault(int(row["position"]), set()).add(int(row["round"]))
    return {position: sorted(rounds) for position, rounds in played.items()}


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Replaces the validation FAA by given values, the same at each position."""
    state: dict[str, Any] = {"position": None}

    def next_value(world: Any, method: Any, server: Any, position: int) -> float:
        if state["position"] != position:
            state.update(position=position, values=iter(values))
        found: Iterator[float] = state["values"]
        return next(found)

    monkeypatch.setattr(early_stop, "validation_faa", next_value)


@pytest.mark.parametrize(
    ("patience", "values", "played"),
    [
        (2, [0.5, 0.6, 0.6, 0.55], [0, 1, 2, 3, 5]),  # as good as before is not better
        (1, [0.5, 0.4], [0, 1, 5]),
        (1, [0.1, 0.2, 0.3, 0.4, 0.5], [0, 1, 2, 3, 4, 5]),
        (2, [0.5, 0.4, 0.6, 0.5, 0.7], [0, 1, 2, 3, 4, 5]),  # one bad round is not two
        (3, [0.5, 0.4, 0.4, 0.4], [0, 1, 2, 3, 5]),
    ],
)
def test_rounds_without_improvement_end_a_position(patience, values, played, tmp_path, monkeypatch):
    scripted(monkeypatch, values)
    out = run.start(tiny(train__rounds=6, train__early_stop=patience), tmp_path / "run", tmp_path)
    assert set(map(tuple, rounds_played(out).values())) == {tuple(played)}
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    measured = [event.get("validation_faa") for event in events if event["event"] == "round" and event["position"] == 0]
    assert measured == [*(pytest.approx(100 * value) for value in values), None]
    assert resolve(str(out / "config.toml")).train.early_stop == patience


def test_rounds_with_statistics_of_clients_are_not_skipped(tmp_path, monkeypatch):
    """PRO refreshes its memory once the base is frozen; it would otherwise not know the classes of the position."""
    scripted(monkeypatch, [0.5] * 6)
    config = tiny("pro", train__rounds=6, train__early_stop=1, params__base_rounds=4)
    assert set(map(tuple, rounds_played(run.start(config, tmp_path / "run", tmp_path)).values())) == {(0, 1, 3, 5)}


def interrupted_and_resumed(config: RunConfig, spot: str, number: int, folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        at_call(spot, number, press_ctrl_c, patch.setattr)
        with pytest.raises(run.Interrupted):
            run.start(config, folder / "cut", folder)
    return run.resume(folder / "cut", folder)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    """With the real validation FAA, by which something is skipped."""
    config = tiny(train__rounds=5, train__early_stop=1)
    whole = run.start(config, tmp_path / "whole", tmp_path)
    assert min(map(len, rounds_played(whole).values())) < 5
    resumed = interrupted_and_resumed(config, "profcil.engine.early_stop:validation_faa", 3, tmp_path)
    assert outcome(resumed) == outcome(whole)


@pytest.mark.parametrize("number", [3, 4, 5])
def test_a_resumed_run_remembers_the_rounds_without_improvement(number, tmp_path, monkeypatch):
    monkeypatch.setattr(early_stop, "validation_faa", lambda *_: 0.5)
    config = tiny(train__rounds=6, train__early_stop=3)
    resumed = interrupted_and_resumed(config, "profcil.engine.executor:Executor.run", number, tmp_path)
    assert rounds_played(resumed)[0] == [0, 1, 2, 3, 5]


def test_the_validation_part_is_training_data_and_never_test_data(tmp_path):
    off = make_world(tiny(), tmp_path)
    on = make_world(tiny(train__early_stop=1), tmp_path)
    held_out = on.bundle.validation
    assert len(on.bundle.train) + len(held_out) == len(off.bundle.train) and 0 < len(held_out) < 200
    assert torch.equal(on.bundle.test.x, off.bundle.test.x) and on.evaluation_examples is on.bundle.test
    method = run.registry.find("methods", "fedavg").METHOD(on.config.params)
    server = method.begin(on.net.weights(MODEL))
    found = early_stop.validation_faa(on, method, server, 0)
    wrong = replace(on.bundle, test=on.bundle.test.part(torch.arange(3)))
    assert early_stop.validation_faa(replace(on, bundle=wrong), method, server, 0) == found


def test_nothing_is_stored_if_it_is_off(tmp_path):
    assert "early_stop" not in to_toml(tiny())
    assert "early_stop = 2" in to_toml(tiny(train__early_stop=2))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--early-stop", "-1"], "at least 0"),
        (["--early-stop", "soon"], "is not a whole number"),
        (["--early-stop", "2", "--evaluate", "validation"], "cannot be scored on it"),
    ],
)
def test_mistakes_are_one_sentence(line, words, capsys):
    assert main(["run", "--dry-run", *line]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
