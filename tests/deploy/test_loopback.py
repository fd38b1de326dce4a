"""Real SuperLinks and SuperNodes in separate processes on this machine. These tests take minutes.

Every wait has a time limit, and every process is stopped by its id.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_growth
from memory_grid import tiny
from test_bindings import pem
from test_same_run import outcome

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table, write_app
from profcil.deploy.client.allowed_apps import app_digest
from profcil.deploy.local.certs import write_certs
from profcil.deploy.local.cluster import CONNECTION, LocalCluster, is_finished, start_federation
from profcil.deploy.server.bindings import fingerprint
from profcil.deploy.status import describe, status
from profcil.engine import run as engine
from profcil.privacy.secure_sum.collection import ROUNDS
from profcil.resolve import RunConfig
from profcil.runs.reader import load_run

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
TIME_LIMIT = 400.0  # seconds; several times what an idle machine needs
FAULTY_APP = Path(__file__).with_name("faulty_app.py")
SLOW_APP = Path(__file__).with_name("slow_app.py")


def events(folder: Path, *kinds: str) -> list[dict]:
    """The events in a run folder. The server may be writing, so an incomplete last line is left out."""
    try:
        lines = (folder / "events.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [e for e in map(json.loads, lines) if e["event"] in kinds]


def write_test_app(folder: Path, config: RunConfig, **policy: Any) -> Path:
    write_app(
        folder / "app",
        settings_table(config, folder / "run", folder, **{"deadline": TIME_LIMIT, "join": TIME_LIMIT, **policy}),
    )
    return folder / "app"


def node_config(folder: Path, client: int, **more: Any) -> dict[str, Any]:
    (folder / "marks").mkdir(exist_ok=True)
    return {"client": client, "home": folder / "sites", "marks": folder / "marks", **more}


def wait_until(condition: Callable[[], object], seconds: float, interval: float = 0.2) -> bool:
    """Waits for a condition. Returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(interval)
    return True


def run_finishes(cluster: LocalCluster, run: Path) -> bool:
    return wait_until(lambda: is_finished(run) or cluster.end_reason(), TIME_LIMIT) and is_finished(run)


def all_clients(clients: int, **more: Any) -> RunConfig:
    """All clients take part in every round; one position, no warm-up."""
    usual = {"stream__clients": clients, "stream__participants": clients, "setting": "homogeneous"}
    return tiny("fedavg", **{**usual, "stream__task_size": 10, "warmup__rounds": 0, "train__batch": 0, **more})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster") as started:
        yield started


def test_the_demo_runs_promax_on_four_nodes_with_the_same_bits(tmp_path, capsys):
    """A shorter form of the documented walk-through. Its own comparison is checked against ours."""
    sizes = ("task_size=5", "rounds=2", "base_rounds=1", "epochs=1", "model.width=4")
    sets = [part for size in sizes for part in ("--set", size)]
    assert main(["deploy", "demo", "--out", str(tmp_path / "demo"), "--json", *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["same_bits"], found["nodes"], found["rounds"]) == (True, 4, 4)
    assert found["deployed_seconds_per_round"] > found["serial_seconds_per_round"] > 0
    assert found["envelope_bytes"] > 0
    run = tmp_path / "demo" / "run"
    assert outcome(run) == outcome(tmp_path / "demo" / "serial")
    assert sorted(e["client"] for e in events(run, "joined")) == [0, 1, 2, 3]
    assert not any(e["silent"] or e["refused"] for e in events(run, "asked"))


def test_secure_sums_go_on_when_a_node_is_killed(tmp_path, cluster):
    """After the first round."""
    config = all_clients(4, privacy__secure_sum="true", privacy__sum_threshold=0.5, train__rounds=3)
    run = tmp_path / "run"
    app = write_test_app(tmp_path, config, deadline=90.0, join=90.0)
    start_federation(cluster, app, [node_config(tmp_path, c) for c in range(4)], worker=True)
    assert wait_until(lambda: events(run, "asked"), TIME_LIMIT, 0.05)
    first = events(run, "asked")[0]
    assert (first["answered"], first["refused"]) == ([0, 1, 2, 3], {})
    assert first["sum"] == {"keys": 4, "shares": 4, "masked": 4, "recovery": 4}
    cluster.stop("node3", signal.SIGKILL)
    assert run_finishes(cluster, run)
    last = events(run, "asked")[-1]
    assert last["answered"] == [0, 1, 2] and len(events(run, "round")) == 3
    assert not list((tmp_path / "sites").glob("*/[012]/open-sum*"))
    kinds = {e.kind for e in load_run(run).ledger.entries if e.direction == "up"}
    assert kinds == {"keys", "shares", "masked", "recovery"}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("promax", ("base_rounds=1",)),
        ("pro", ("base_rounds=1", "warmup.rounds=0", "privacy.sum_support=true", "privacy.min_support=30")),
        ("probayes", ("dictionary=30", "warmup.rounds=0", "privacy.unit=example", "privacy.epsilon=8")),
    ],
    ids=["plain", "counted", "noised"],
)
def test_secure_sums_over_the_network_have_the_same_bits(tmp_path, capsys, method, more):
    """With a warm-up, rounds and surveys; with counts before statistics; with noise."""
    sizes = ("task_size=5", "rounds=2", "epochs=1", "model.width=4", "privacy.secure_sum=true", "participants=4")
    sets = [part for size in (*sizes, *more) for part in ("--set", size)]
    line = ["deploy", "demo", "--method", method, "--worker", "--out", str(tmp_path / "demo"), "--json"]
    assert main([*line, *sets]) == 0
    assert json.loads(capsys.readouterr().out)["same_bits"]
    exchanges = [set(e["sum"]) for e in events(tmp_path / "demo" / "run", "asked")]
    assert set(ROUNDS) in exchanges and all(found in (set(ROUNDS), {"keys"}) for found in exchanges)


def test_workers_that_stay_up_give_the_same_bits(tmp_path, capsys):
    sizes = ("task_size=5", "rounds=2", "base_rounds=1", "epochs=1", "model.width=4")
    sets = [part for size in sizes for part in ("--set", size)]
    line = ["deploy", "demo", "--worker", "--nodes", "2", "--out", str(tmp_path / "demo"), "--json", *sets]
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["same_bits"]
    cluster = tmp_path / "demo" / "cluster"
    assert "training round" in (cluster / "node0-worker.log").read_text()  # not Flower's own process
    assert "training round" not in (cluster / "node0.log").read_text()


def test_a_server_killed_within_a_position_is_resumed_with_the_same_bits(tmp_path, cluster):
    """With a replay method: its clients must start from the private tensors of the last complete round."""
    config = tiny("fedcbdr", warmup__rounds=0)
    run = tmp_path / "run"
    app = write_test_app(tmp_path, config)
    start_federation(cluster, app, [node_config(tmp_path, c) for c in range(3)])
    # After four requests the run is in position 1, before its second round.
    assert wait_until(lambda: len(events(run, "asked")) >= 4, TIME_LIMIT, 0.05)
    [started] = events(run, "started")
    os.kill(started["pid"], signal.SIGKILL)
    assert not is_finished(run)
    cluster.submit(app)
    assert wait_until(lambda: is_finished(run), TIME_LIMIT)
    assert [e["position"] for e in events(run, "resumed")] == [1]
    assert outcome(run) == outcome(engine.start(config, tmp_path / "serial", tmp_path))


def test_a_run_continues_with_killed_hanging_late_and_duplicate_nodes(tmp_path, cluster):
    """Node 1 is killed in round 1, node 2 hangs past the deadline, client 3 joins late, two nodes claim client 0."""
    run = tmp_path / "run"
    marks = tmp_path / "marks"
    app = write_test_app(tmp_path, all_clients(4, train__rounds=7), deadline=30.0, join=25.0)
    shutil.copy(FAULTY_APP, app / "profcil_app.py")
    first = [node_config(tmp_path, 0), node_config(tmp_path, 1, **{"hang-at": "round 0.1", "hang": 600.0})]
    start_federation(cluster, app, [*first, node_config(tmp_path, 2, **{"hang-at": "round 0.1", "hang": 35.0})])
    assert wait_until(lambda: (marks / "1 round 0.1").exists(), TIME_LIMIT)
    cluster.stop("node1", signal.SIGKILL)
    cluster.start_node("late", node_config(tmp_path, 3))
    cluster.start_node("rival", node_config(tmp_path, 0))
    assert run_finishes(cluster, run)
    asked = events(run, "asked")
    assert asked[0]["answered"] == [0, 1, 2]  # client 3 has not joined yet
    assert asked[1]["answered"] == [0]
    assert {*asked[1]["silent"], *map(int, asked[1]["refused"])} == {1, 2}
    assert asked[-1]["answered"] == [0, 2, 3]  # with the node that hung and the late one, without the killed one
    assert [(e["client"], e["round"]) for e in events(run, "late reply dropped")] == [(2, 1)]
    assert {e["client"] for e in events(run, "claimed twice")} == {0}
    assert len(asked) == 7
    assert events(run, "absent")[0]["clients"] == [3]


def test_fast_nodes_do_not_wait_for_a_slow_one_and_its_late_reply_is_used(tmp_path, cluster):
    """Its first turn lasts until the others have made three updates without it."""
    run = tmp_path / "run"
    config = all_clients(3, clock__mode="buffer", train__rounds=8)
    app = write_test_app(tmp_path, config)
    shutil.copy(SLOW_APP, app / "profcil_app.py")
    slow = node_config(tmp_path, 2, until=tmp_path / "release")
    start_federation(cluster, app, [node_config(tmp_path, 0), node_config(tmp_path, 1), slow], worker=True)
    assert wait_until(lambda: len(events(run, "round")) >= 3, TIME_LIMIT)
    (tmp_path / "release").touch()
    assert run_finishes(cluster, run)
    asked = [e for e in events(run, "asked") if e["stage"] == "round"]
    assert all(sorted(e["answered"]) == [0, 1] for e in asked[:3])
    assert [2, 1] in asked[0]["at_work"]
    arrivals = [a for e in asked for a in e["arrivals"]]
    late = [a for a in arrivals if a["client"] == 2]
    assert (late[0]["position"], late[0]["round"]) == (0, 0) and late[0]["age"] >= 3
    tally = json.loads((run / "run.json").read_text())["tally"]
    assert tally["used_replies"] == len(arrivals) and tally["staleness"] == sum(a["age"] for a in arrivals)
    assert tally["lost_replies"] == 0
    assert f"age of replies in updates: 0: {sum(a['age'] == 0 for a in arrivals)}, " in describe(status(run))


def test_a_site_joins_and_a_class_is_declared_while_it_runs(tmp_path, cluster, monkeypatch):
    """The third site is started, and a class is added to the terms, while the first position is trained."""
    monkeypatch.setitem(test_growth.WORDS, "burn", "skin blister")
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    nodes = test_growth.write_three_sites(tmp_path)
    text = test_growth.terms()
    run = tmp_path / "run"
    rules = {"federation": text, "deadline": TIME_LIMIT, "join": 20.0}
    config = test_growth.config_of(text, "promax")
    write_app(tmp_path / "app", settings_table(config, run, tmp_path / "test.csv", **rules))
    start_federation(cluster, tmp_path / "app", [nodes[7], nodes[8]])
    assert wait_until(lambda: events(run, "asked"), TIME_LIMIT)
    cluster.start_node("west", nodes[9])
    (run / "federation.toml").write_text(test_growth.terms(test_growth.BURN))
    assert run_finishes(cluster, run)
    [extended] = events(run, "extended")
    assert extended["classes"] == ["burn"] and extended["sites"] in (["west"], [])
    [joined] = [e["position"] for e in events(run, "extended") if "west" in e["sites"]]
    test_growth.join_at(tmp_path / "west", joined + 1)
    later = test_growth.terms(test_growth.BURN)
    assert test_growth.result(test_growth.simulate(tmp_path, later)) == test_growth.result(run)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with TLS and node keys, one node that is accepted and three that are rejected."""
    folder = tmp_path_factory.mktemp("secured")
    certs = folder / "certs"
    others = folder / "others"
    write_certs(certs, nodes=2)
    write_certs(others, nodes=0)
    with LocalCluster(folder / "cluster", secure=certs) as cluster:
        app = write_test_app(folder, all_clients(4, train__rounds=1), join=20.0)
        cluster.start_superlink()
        registered = cluster.flwr("supernode", "register", certs / "node-0.pub", CONNECTION)
        assert registered.returncode == 0, registered.stdout + registered.stderr
        cluster.start_node("registered", node_config(folder, 0), key=certs / "node-0")
        cluster.start_node("keyless", node_config(folder, 1))
        cluster.start_node("unregistered", node_config(folder, 2), key=certs / "node-1")
        cluster.start_node("distrustful", node_config(folder, 3), key=certs / "node-0", trust=others / "ca.crt")
        cluster.submit(app)
        assert wait_until(lambda: is_finished(folder / "run"), TIME_LIMIT)
    return folder


def test_a_registered_node_is_used_over_tls(secured):
    assert [e["client"] for e in events(secured / "run", "joined")] == [0]
    assert [e["answered"] for e in events(secured / "run", "asked")] == [[0]]
    bound = json.loads((secured / "run" / "run.json").read_text())["keys"]
    key = fingerprint(pem(secured / "certs" / "node-0.pub"))
    assert {client: entry["key"] for client, entry in bound.items()} == {"0": key}


@pytest.mark.parametrize(
    ("name", "client", "reason"),
    [
        ("keyless", 1, "must be registered"),
        ("unregistered", 2, "Failed to activate"),
        ("distrustful", 3, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_other_nodes_are_rejected(secured, name, client, reason):
    assert reason in (secured / "cluster" / f"{name}.log").read_text()
    assert client in events(secured / "run", "absent")[0]["clients"]
    assert not list((secured / "marks").glob(f"{client} *"))


def test_a_site_runs_only_the_apps_on_its_list(tmp_path, cluster):
    """A line that the server added to the app runs where the app is allowed, and nowhere else."""
    app = write_test_app(tmp_path, all_clients(2, train__rounds=1), join=60.0)
    (tmp_path / "before.txt").write_text(app_digest(app))
    added = "from pathlib import Path\nimport os\nPath(os.environ['HOME'], 'ran').touch()\n"
    (app / "profcil_app.py").write_text(f"{(app / 'profcil_app.py').read_text()}\n{added}")
    (tmp_path / "after.txt").write_text(app_digest(app))
    cluster.start_superlink()
    for client, name in enumerate(("after", "before")):
        cluster.env["HOME"] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        cluster.start_node(name, node_config(tmp_path, client), allow=tmp_path / f"{name}.txt")
    cluster.submit(app)
    assert run_finishes(cluster, tmp_path / "run")
    assert [e["answered"] for e in events(tmp_path / "run", "asked")] == [[0]]
    assert "not on this site's list" in events(tmp_path / "run", "refused")[0]["reason"]
    assert "LEFT OUT: the app" in (tmp_path / "cluster" / "before.log").read_text()
    assert (tmp_path / "after" / "ran").exists()
    assert not (tmp_path / "before" / "ran").exists()
    assert not list((tmp_path / "before").rglob("profcil_app.py"))


def test_the_same_app_runs_a_hundred_clients_under_ray(tmp_path, cluster):
    pytest.importorskip("ray")
    config = all_clients(100, train__rounds=2, stream__participants=10)
    cluster.start_superlink("--simulation")
    cluster.submit(
        write_test_app(tmp_path, config), "--federation-config", "num-supernodes=100 client-resources-num-cpus=1"
    )
    assert run_finishes(cluster, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(engine.start(config, tmp_path / "serial", tmp_path))
    assert len(events(tmp_path / "run", "joined")) == 100
