"""A whole deployment on this machine, and what it costs more than the serial simulation of the same run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from profcil.deploy.app_folder import settings_table, write_app
from profcil.deploy.cluster import Trial, federation, finished, program
from profcil.deploy.status import status
from profcil.engine.run import start
from profcil.errors import Failure
from profcil.io.atomic_files import read_tensors
from profcil.resolve import RunConfig

PATIENCE = 1800.0  # seconds for the whole run
EVERY = 1.0


def play(config: RunConfig, out: Path, data: Path, ray: bool = False) -> dict[str, Any]:
    """The run twice, alone and deployed, in folders below `out`."""
    out = out.absolute()  # Flower's processes work elsewhere
    program("flower-superlink")  # whether it is there shows before the first run, not after
    alone = out / "serial"
    if not finished(alone):
        start(config, alone, data)
    write_app(out / "app", settings_table(config, out / "run", data, deadline=300.0, join=300.0))
    began, nodes = time.monotonic(), config.stream.clients
    with Trial(out / "trial") as trial:
        if ray:
            trial.superlink("--simulation")
            trial.run(out / "app", "--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1")
        else:
            home, share = out / "sites", str(Path(data).absolute())
            federation(trial, out / "app", [{"client": i, "home": home, "data-dir": share} for i in range(nodes)])
        wait(trial, out / "run")
    return compare(alone, out / "run", nodes, time.monotonic() - began)


def wait(trial: Trial, run: Path) -> None:
    """Until the run is done, telling where it stands."""
    until, told = time.monotonic() + PATIENCE, ""
    while not finished(run):
        if time.monotonic() > until or (reason := trial.ended()):
            raise Failure(f"the deployment did not finish ({reason or 'too slow'}); see the logs in {trial.folder}")
        now = place(run)
        if now != told:
            print(told := now, file=sys.stderr)
        time.sleep(EVERY)


def place(run: Path) -> str:
    if not (run / "config.toml").exists():
        return "starting"
    last = status(run)["last"]
    return f"{last['stage']} {last['position']}.{last['round']}: answered {last['answered']}" if last else "waiting"


def compare(alone: Path, run: Path, nodes: int, seconds: float) -> dict[str, Any]:
    """Whether both came to the same, and what a round took in each."""
    facts = [json.loads((p / "run.json").read_text(encoding="utf-8")) for p in (alone, run)]
    found = status(run)
    rounds = found["rounds"] * found["position"]
    each = [f["seconds"] / rounds for f in facts]
    return {
        "same_bits": outcome(alone) == outcome(run),
        "nodes": nodes,
        "rounds": rounds,
        "seconds": round(seconds, 1),  # with starting and stopping
        "serial_seconds_per_round": round(each[0], 3),
        "deployed_seconds_per_round": round(each[1], 3),
        "overhead_seconds_per_round": round(each[1] - each[0], 3),
        "payload_bytes": found["payload_bytes"],
        "envelope_bytes": found["flower_bytes"] - found["payload_bytes"],
        "metrics": facts[1]["metrics"],
        "run": str(run),
    }


def outcome(folder: Path) -> tuple[Any, ...]:
    """Model, scores and ledger, to the bit. Private memories are left out: a deployment's server has none."""
    found = read_tensors(folder / "state.safetensors")
    tensors = {k: t.numpy().tobytes() for k, t in (found or ({}, {}))[0].items() if k.startswith("server/")}
    return tensors, *((folder / name).read_bytes() for name in ("scores.json", "ledger.csv", "plan.npz"))


def report(f: dict[str, Any]) -> list[str]:
    scores = ", ".join(f"{k.upper()} {v:.2f}" for k, v in sorted(f["metrics"].items()))
    return [
        f"{f['rounds']} rounds on {f['nodes']} nodes in {f['seconds']} s; {scores}",
        f"scores, model and ledger equal to the serial simulation's, to the bit: {'yes' if f['same_bits'] else 'NO'}",
        f"a round: {f['serial_seconds_per_round']} s serial, {f['deployed_seconds_per_round']} s deployed, "
        f"overhead {f['overhead_seconds_per_round']} s",
        f"payload {f['payload_bytes']:,} bytes, Flower's envelope {f['envelope_bytes']:,} more",
        f"run folder: {f['run']}",
    ]
