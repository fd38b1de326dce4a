"""Real SuperLinks and SuperNodes in processes of their own on this machine; minutes, not seconds.

Every wait has an end, and whatever was started is ended by its id.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_grid import tiny
from test_same_run import essence

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table, write_app
from profcil.deploy.certs import write_certs
from profcil.deploy.cluster import Trial, federation, finished, wait_for
from profcil.engine import run as engine
from profcil.resolve import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
LONG = 400.0  # seconds: several times what an idle machine needs, for one that is not
FAULTY = '''
import time
from pathlib import Path

from profcil.deploy import app


def trip(message, context, call_next):
    """Leaves a mark when work begins; hangs where the node's configuration says so."""
    node, at = context.node_config, message.metadata.group_id
    if at:
        Path(node["marks"], f"{node['client']} {at}").touch()
    if at and at == node.get("hang-at"):
        time.sleep(float(node["hang"]))
    return call_next(message, context)


server_app = app.server_app
client_app = app.make_client_app([trip])
'''


def events(folder: Path, *kinds: str) -> list[dict]:
    """Whole lines only: somebody may be writing."""
    try:
        lines = (folder / "events.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [e for e in map(json.loads, lines) if e["event"] in kinds]


def app_of(folder: Path, config: RunConfig, **policy: Any) -> Path:
    write_app(
        folder / "app", settings_table(config, folder / "run", folder, **{"deadline": LONG, "join": LONG, **policy})
    )
    return folder / "app"


def node(folder: Path, client: int, **more: Any) -> dict[str, Any]:
    (folder / "marks").mkdir(exist_ok=True)
    return {"client": client, "home": folder / "sites", "marks": folder / "marks", **more}


def ends(trial: Trial, run: Path) -> bool:
    return wait_for(lambda: finished(run) or trial.ended(), LONG) and finished(run)


def everyone(clients: int, **more: Any) -> RunConfig:
    """All clients in every round, one position, no warm-up."""
    usual = {"stream__clients": clients, "stream__participants": clients, "setting": "homogeneous"}
    return tiny("fedavg", **{**usual, "stream__task_size": 10, "warmup__rounds": 0, "train__batch": 0, **more})


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    with Trial(tmp_path / "trial") as made:
        yield made


def test_the_demo_plays_promax_on_four_nodes_to_the_same_bits(tmp_path, capsys):
    """The documented walk-through, a little shorter: its verdict, and the same looked at from here."""
    sizes = ("task_size=5", "rounds=2", "base_rounds=1", "epochs=1", "model.width=4")
    sets = [part for size in sizes for part in ("--set", size)]
    assert main(["deploy", "demo", "--out", str(tmp_path / "demo"), "--json", *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["same_bits"], found["nodes"], found["rounds"]) == (True, 4, 4)
    assert found["deployed_seconds_per_round"] > found["serial_seconds_per_round"] > 0
    assert found["envelope_bytes"] > 0
    run = tmp_path / "demo" / "run"
    assert essence(run) == essence(tmp_path / "demo" / "serial")
    assert sorted(e["client"] for e in events(run, "joined")) == [0, 1, 2, 3]
    assert not any(e["silent"] or e["refused"] for e in events(run, "asked"))


def test_a_server_killed_in_the_middle_of_a_position_goes_on_to_the_same_bits(tmp_path, trial):
    """A replay method: what its clients keep privately must be the memory of the last whole round."""
    config, run = tiny("fedcbdr", warmup__rounds=0), tmp_path / "run"
    app = app_of(tmp_path, config)
    federation(trial, app, [node(tmp_path, c) for c in range(3)])
    assert wait_for(lambda: len(events(run, "asked")) >= 4, LONG, 0.05)  # in position 1, its second round to come
    [began] = events(run, "started")
    os.kill(began["pid"], signal.SIGKILL)
    assert not finished(run)
    trial.run(app)
    assert wait_for(lambda: finished(run), LONG)
    assert [e["position"] for e in events(run, "resumed")] == [1]
    assert essence(run) == essence(engine.start(config, tmp_path / "alone", tmp_path))


def test_killed_hanging_late_and_double_nodes_do_not_stop_a_run(tmp_path, trial):
    """Node 1 is killed in round 1, node 2 hangs past its deadline, client 3 joins late, client 0 is claimed twice."""
    run, marks = tmp_path / "run", tmp_path / "marks"
    app = app_of(tmp_path, everyone(4, train__rounds=7), deadline=30.0, join=25.0)
    (app / "profcil_app.py").write_text(FAULTY)
    first = [node(tmp_path, 0), node(tmp_path, 1, **{"hang-at": "round 0.1", "hang": 600.0})]
    federation(trial, app, [*first, node(tmp_path, 2, **{"hang-at": "round 0.1", "hang": 35.0})])
    assert wait_for(lambda: (marks / "1 round 0.1").exists(), LONG)
    trial.stop("node1", signal.SIGKILL)
    trial.node("late", node(tmp_path, 3))
    trial.node("rival", node(tmp_path, 0))
    assert ends(trial, run)
    asked = events(run, "asked")
    assert asked[0]["answered"] == [0, 1, 2]  # client 3 is not there yet
    assert asked[1]["answered"] == [0]
    assert {*asked[1]["silent"], *map(int, asked[1]["refused"])} == {1, 2}
    assert asked[-1]["answered"] == [0, 2, 3]  # the hanging one is back, the late one is in, the killed one is not
    assert [(e["client"], e["round"]) for e in events(run, "late reply dropped")] == [(2, 1)]
    assert {e["client"] for e in events(run, "claimed twice")} == {0}
    assert len(asked) == 7
    assert events(run, "absent")[0]["clients"] == [3]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run behind TLS and node keys, with one node that may come in and three that may not."""
    folder = tmp_path_factory.mktemp("secured")
    certs, others = folder / "certs", folder / "others"
    write_certs(certs, nodes=2)
    write_certs(others, nodes=0)
    with Trial(folder / "trial", secure=certs) as trial:
        app = app_of(folder, everyone(4, train__rounds=1), join=20.0)
        trial.superlink()
        registered = trial.flwr("supernode", "register", certs / "node-0.pub", "trial")
        assert registered.returncode == 0, registered.stdout + registered.stderr
        trial.node("registered", node(folder, 0), key=certs / "node-0")
        trial.node("keyless", node(folder, 1))
        trial.node("unregistered", node(folder, 2), key=certs / "node-1")
        trial.node("distrustful", node(folder, 3), key=certs / "node-0", trust=others / "ca.crt")
        trial.run(app)
        assert wait_for(lambda: finished(folder / "run"), LONG)
    return folder


def test_a_registered_node_works_behind_tls(secured):
    assert [e["client"] for e in events(secured / "run", "joined")] == [0]
    assert [e["answered"] for e in events(secured / "run", "asked")] == [[0]]


@pytest.mark.parametrize(
    ("name", "client", "reason"),
    [
        ("keyless", 1, "must be registered"),
        ("unregistered", 2, "Failed to activate"),
        ("distrustful", 3, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_no_other_node_gets_anywhere(secured, name, client, reason):
    assert reason in (secured / "trial" / f"{name}.log").read_text()
    assert client in events(secured / "run", "absent")[0]["clients"]
    assert not list((secured / "marks").glob(f"{client} *"))


def test_the_same_app_runs_a_hundred_clients_under_ray(tmp_path, trial):
    pytest.importorskip("ray")
    config = everyone(100, train__rounds=2, stream__participants=10)
    trial.superlink("--simulation")
    trial.run(app_of(tmp_path, config), "--federation-config", "num-supernodes=100 client-resources-num-cpus=1")
    assert ends(trial, tmp_path / "run")
    assert essence(tmp_path / "run") == essence(engine.start(config, tmp_path / "alone", tmp_path))
    assert len(events(tmp_path / "run", "joined")) == 100
