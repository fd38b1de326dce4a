"""A deployment on this machine, compared with the serial simulation of the same run in bits and in time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from profcil.deploy.app_folder import settings_table, write_app
from profcil.deploy.local.cluster import LocalCluster, find_program, is_finished, start_federation
from profcil.deploy.status import moment, status
from profcil.engine.run import start
from profcil.errors import Failure
from profcil.io.atomic_files import read_tensors
from profcil.resolve import RunConfig

RUN_SECONDS = 1800.0  # time limit for the whole run
POLL_SECONDS = 1.0


def run_demo(config: RunConfig, out: Path, data: Path, ray: bool = False, worker: bool = False) -> dict[str, Any]:
    """Runs the simulation and the deployment in folders below `out`, and compares them."""
    out = out.absolute()  # Flower's processes have another working directory
    find_program("flower-superlink")  # raises an error before the first run if Flower is missing
    if not is_finished(out / "serial"):
        start(config, out / "serial", data)
    write_app(out / "app", settings_table(config, out / "run", data, deadline=300.0, join=300.0))
    began = time.monotonic()
    with LocalCluster(out / "cluster") as cluster:
        if ray:
            start_simulation(cluster, out / "app", config.stream.clients)
        else:
            start_federation(cluster, out / "app", node_configs(config.stream.clients, out, data), worker)
        wait_until_finished(cluster, out / "run")
    seconds = time.monotonic() - began
    return compare(out / "serial", out / "run", config.stream.clients, seconds)


def start_simulation(cluster: LocalCluster, app: Path, nodes: int) -> None:
    """Starts the app under Flower's Ray simulation."""
    cluster.start_superlink("--simulation")
    cluster.submit(app, "--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1")


def node_configs(nodes: int, out: Path, data: Path) -> list[dict[str, Any]]:
    shared = {"home": out / "sites", "data-dir": str(Path(data).absolute())}
    return [{"client": i, **shared} for i in range(nodes)]


def wait_until_finished(cluster: LocalCluster, run: Path) -> None:
    """Waits for the end of the run and prints its progress."""
    end = time.monotonic() + RUN_SECONDS
    printed = ""
    while not is_finished(run):
        if time.monotonic() > end or (reason := cluster.end_reason()):
            if is_finished(run):  # it ended while Flower was asked
                return
            raise Failure(f"the deployment did not finish ({reason or 'too slow'}); see the logs in {cluster.folder}")
        progress = describe_progress(run)
        if progress != printed:
            print(progress, file=sys.stderr)
            printed = progress
        time.sleep(POLL_SECONDS)


def describe_progress(run: Path) -> str:
    if not (run / "config.toml").exists():
        return "starting"
    last = status(run)["last"]
    return f"{moment(last)}: answered {last['answered']}" if last else "waiting for clients"


def compare(serial: Path, deployed: Path, nodes: int, seconds: float) -> dict[str, Any]:
    """Whether both runs have the same result, and how long a round took in each."""
    serial_facts = read_facts(serial)
    deployed_facts = read_facts(deployed)
    found = status(deployed)
    rounds = found["rounds"] * found["position"]
    serial_round = serial_facts["seconds"] / rounds
    deployed_round = deployed_facts["seconds"] / rounds
    return {
        "same_bits": outcome(serial) == outcome(deployed),
        "nodes": nodes,
        "rounds": rounds,
        "seconds": round(seconds, 1),  # with the start and stop of all processes
        "serial_seconds_per_round": round(serial_round, 3),
        "deployed_seconds_per_round": round(deployed_round, 3),
        "overhead_seconds_per_round": round(deployed_round - serial_round, 3),
        "payload_bytes": found["payload_bytes"],
        "envelope_bytes": found["flower_bytes"] - found["payload_bytes"],
        "metrics": deployed_facts["metrics"],
        "run": str(deployed),
    }


def read_facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def outcome(folder: Path) -> tuple[Any, ...]:
    """The bits of model, scores, ledger and plan. Private tensors are left out: a deployment's server has none."""
    found = read_tensors(folder / "state.safetensors")
    tensors = found[0] if found else {}
    server = {k: t.numpy().tobytes() for k, t in tensors.items() if k.startswith("server/")}
    return server, *((folder / name).read_bytes() for name in ("scores.json", "ledger.csv", "plan.npz"))


def report(f: dict[str, Any]) -> list[str]:
    """The comparison as lines of text."""
    scores = ", ".join(f"{k.upper()} {v:.2f}" for k, v in sorted(f["metrics"].items()))
    return [
        f"{f['rounds']} rounds on {f['nodes']} nodes in {f['seconds']} s; {scores}",
        f"scores, model and ledger have the same bits as the serial simulation: {'yes' if f['same_bits'] else 'NO'}",
        f"seconds per round: {f['serial_seconds_per_round']} serial, {f['deployed_seconds_per_round']} deployed, "
        f"overhead {f['overhead_seconds_per_round']}",
        f"payload {f['payload_bytes']:,} bytes; Flower's envelope adds {f['envelope_bytes']:,} bytes",
        f"run folder: {f['run']}",
    ]
