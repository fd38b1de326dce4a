"""A deployment that takes replies as they come: with the order of arrivals of a simulation it has its bits."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from memory_grid import tiny
from scripted_grid import ScriptedGrid, make_grid, script_of, updates
from test_same_run import outcome

from profcil.deploy.app_folder import settings_table
from profcil.deploy.server import entry
from profcil.engine import run
from profcil.errors import ConfigError
from profcil.resolve import RunConfig

STREAM = {"stream__clients": 4, "stream__participants": 3, "train__rounds": 3, "warmup__rounds": 0}
BUFFER = {"clock__mode": "buffer", "clock__buffer": 1, "clock__statistics": 0.25}
TIMES = {"clock__stragglers": 0.25, "clock__spread": 0.5}


def simulated(method: str, **more: Any) -> RunConfig:
    return tiny(method, **{**STREAM, **BUFFER, **TIMES, **more})


def live(method: str, **more: Any) -> RunConfig:
    """The same without what simulates the time of clients."""
    return tiny(method, **{**STREAM, **BUFFER, **more})


def deploy_by_script(script: Any, config: RunConfig, tmp_path: Path, **policy: Any) -> tuple[Path, ScriptedGrid]:
    settings = settings_table(config, tmp_path / "run", tmp_path, **{"deadline": 60.0, "join": 0.3, **policy})
    grid = make_grid(script, settings, config.stream.clients, tmp_path / "sites")
    return entry.start(grid, settings), grid


def events(folder: Path, *kinds: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [e for e in lines if e["event"] in kinds]


def bits(folder: Path) -> dict[str, Any]:
    """The result of a run. The ledger's lines are sorted: the simulation sends all turns of an update at once."""
    found = outcome(folder)
    return {**found, "ledger.csv": sorted(csv.reader(found["ledger.csv"].decode().splitlines()))}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("fedssi", {}),
        ("promax", {}),
        ("promax", {"transport": "linear"}),
        ("prolin", {"base_rounds": 2}),
        ("prolin", {"base_rounds": 0}),
        ("promax", {"transfer": "full"}),
    ],
)
def test_with_the_arrivals_of_a_simulation_a_deployment_has_its_bits(tmp_path, method, more):
    config = simulated(method, **more)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deploy_by_script(script_of(config, tmp_path), live(method, **more), tmp_path)
    assert bits(folder) == bits(serial)
    rounds = [events(path, "round") for path in (serial, folder)]
    counted = ("started_turns", "used_replies", "staleness", "late_statistics", "loss")
    assert [[e[name] for name in counted] for e in rounds[0]] == [[e[name] for name in counted] for e in rounds[1]]
    assert sum(e["staleness"] for e in rounds[1]) > 0


def test_with_lost_replies_it_has_the_model_of_the_simulation(tmp_path):
    """The ledger differs: a client whose reply was refused is sent all blocks again."""
    config = simulated("promax", clock__dropout=0.1)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deploy_by_script(script_of(config, tmp_path), live("promax"), tmp_path)
    assert sum(e["lost_replies"] for e in events(folder, "round")) > 0
    assert outcome(folder)["tensors"] == outcome(serial)["tensors"]
    assert outcome(folder)["scores.json"] == outcome(serial)["scores.json"]


def test_the_order_of_arrivals_is_in_the_events(tmp_path):
    """It explains the run: who replied to what, how old that was, and in which order."""
    config = simulated("promax", clock__slowdown=10.0)
    planned = sorted(p for u in updates(config, tmp_path) for p in (*u.opened, *u.arrived, *u.in_time))
    folder, _ = deploy_by_script(script_of(config, tmp_path), live("promax"), tmp_path)
    found = [a for e in events(folder, "asked") for a in e["arrivals"]]
    assert [(a["client"], a["what"]) for a in found] == [(p.client, p.what) for p in planned]
    turns = [a["age"] for a in found if a["what"] == "turn"]
    assert sum(turns) == sum(e["staleness"] for e in events(folder, "round")) > 0


def test_another_order_of_arrivals_gives_another_model(tmp_path):
    """Otherwise the equality above would say nothing."""
    config = simulated("fedavg")
    folder, _ = deploy_by_script(script_of(config, tmp_path), live("fedavg"), tmp_path)
    other = simulated("fedavg", clock__stragglers=0.75, clock__slowdown=9.0)
    serial = run.start(other, tmp_path / "serial", tmp_path)
    assert outcome(folder)["tensors"] != outcome(serial)["tensors"]


@pytest.mark.parametrize(
    ("method", "settings", "word"),
    [
        ("fedavg", {"robust__aggregation": "median"}, "robust"),
        ("fedavg", {"privacy__secure_sum": "true", "privacy__sum_clients": 2}, "secure_sum"),
        ("fedavg", {"privacy__unit": "client", "privacy__epsilon": 8.0}, "privacy.unit"),
        ("fedcbdr", {}, "FedCBDR"),
    ],
)
def test_what_the_simulation_refuses_a_deployment_refuses(tmp_path, method, settings, word):
    with pytest.raises(ConfigError, match=word):
        deploy_by_script({}, live(method, **settings), tmp_path)
