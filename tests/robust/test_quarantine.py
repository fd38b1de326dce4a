"""A client whose replies are dropped again and again is not asked any more; a resumed run knows it."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from attacks import MODEL_ATTACKS
from liars import lying_world

from profcil.deploy.status import describe, status
from profcil.engine import run
from profcil.engine.admission import count_strikes, still_asked
from profcil.io.atomic_files import read_tensors
from profcil.resolve import RunConfig, resolve, to_toml

LIAR = 1
FLIP = next(a for a in MODEL_ATTACKS if a.name == "weights with their sign flipped")
SMALL = {
    "stream.clients": 4,
    "stream.participants": 4,
    "stream.task_size": 5,
    "train.rounds": 4,
    "train.epochs": 1,
    "warmup.rounds": 1,
    "threads": 1,
    "workers": 1,
}


def config(**more: Any) -> RunConfig:
    sets = SMALL | {"robust.aggregation": "clipped", "robust.quarantine": 2} | more
    return resolve(flags={"dataset": "digits", "method": "fedavg", "setting": "homogeneous"}, sets=sets)


def lied_to(folder: Path, **more: Any) -> Path:
    return run.start(config(**more), folder, folder.parent, make=lying_world(FLIP, (LIAR,)))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def asked(folder: Path) -> set[tuple[int, int]]:
    """The rounds, by position and number, in which the liar was sent something."""
    with open(folder / "ledger.csv") as file:
        rows = list(csv.DictReader(file))
    mine = [r for r in rows if int(r["client"]) == LIAR and r["stage"] == "round"]
    return {(int(r["position"]), int(r["round"])) for r in mine}


def test_after_two_dropped_replies_a_client_is_not_asked_again(tmp_path):
    folder = lied_to(tmp_path / "run")
    assert asked(folder) == {(0, 0), (0, 1)}
    dropping = [e for e in events(folder) if "dropped" in e]
    assert [list(e["dropped"]) for e in dropping] == [[str(LIAR)]] * 2
    assert [e.get("quarantined") for e in dropping] == [None, [LIAR]]
    assert json.loads((folder / "run.json").read_text())["tally"]["dropped_replies"] == 2
    text = describe(status(folder))
    assert f"client {LIAR}: 2 replies dropped, last because its model moved" in text
    assert "it is not asked again" in text


def test_without_quarantine_every_reply_is_dropped(tmp_path):
    folder = lied_to(tmp_path / "run", **{"robust.quarantine": 0})
    assert len([e for e in events(folder) if "dropped" in e]) == 8 == len(asked(folder))


@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_a_resumed_run_has_the_same_bits(tmp_path, monkeypatch, rounds):
    """Ctrl-C before, at and after the round of the quarantine."""
    whole = lied_to(tmp_path / "whole")
    messages = []

    def press_ctrl_c(progress: Any) -> None:
        messages.append(progress)
        if len([p for p in messages if p.what == "round"]) == rounds:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(run.Interrupted):
        make = lying_world(FLIP, (LIAR,))
        run.start(config(), tmp_path / "cut", tmp_path, observe=press_ctrl_c, make=make)
    resumed = run.resume(tmp_path / "cut", make=lying_world(FLIP, (LIAR,)))
    first, second = (read_tensors(f / "state.safetensors") for f in (whole, resumed))
    assert {k: t.numpy().tobytes() for k, t in first[0].items()} == {
        k: t.numpy().tobytes() for k, t in second[0].items()
    }
    assert asked(whole) == asked(resumed)
    assert (whole / "ledger.csv").read_bytes() == (resumed / "ledger.csv").read_bytes()


def test_a_round_counts_once_and_honest_clients_get_no_strike():
    strikes: dict[int, int] = {}
    assert count_strikes(strikes, {}, 2) == {} and strikes == {}
    assert count_strikes(strikes, {3: "why"}, 2) == {"dropped_replies": 1, "dropped": {"3": "why"}}
    assert count_strikes(strikes, {3: "why"}, 2)["quarantined"] == [3]
    assert still_asked([1, 3], strikes, 2) == [1] and still_asked([1, 3], strikes, 0) == [1, 3]


def test_a_run_with_plain_means_stores_nothing_of_it():
    assert "robust" not in to_toml(config(**{"robust.aggregation": "mean"}))
    assert 'aggregation = "clipped"' in to_toml(config())
