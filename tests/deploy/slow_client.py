"""How long a deployment with a slow client lasts, with a server that waits for all and with one that does not.

    python tests/deploy/slow_client.py --out /tmp/slow [--slow 30] [--seeds 100] [--set KEY=VALUE ...]

Real SuperLink, SuperNodes and workers on this machine, PRO-MAX on the validation part of digits, four clients that all
take part in each round. Every turn of the last client lasts some seconds longer. The seconds are those of run.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from profcil.deploy.app_folder import settings_table, write_app
from profcil.deploy.local.cluster import LocalCluster, is_finished, start_federation
from profcil.deploy.local.demo import wait_until_finished
from profcil.deploy.status import describe, status
from profcil.resolve import RunConfig, resolve

SLOW_APP = Path(__file__).with_name("slow_app.py")
CLIENTS = 4
STREAM = ("clients=4", "participants=4", "task_size=5", "rounds=4", "warmup.rounds=0", "threads=1")


def config_of(sets: list[str], seed: int) -> RunConfig:
    flags = {"dataset": "digits", "method": "promax", "seed": seed, "evaluate": "validation", "accelerate": "off"}
    return resolve(flags=flags, sets=[*STREAM, *sets])


def run(config: RunConfig, out: Path, slow: float) -> dict[str, float]:
    """Deploys one run, unless its folder has it. Returns its seconds and scores."""
    if not is_finished(out / "run"):
        write_app(out / "app", settings_table(config, out / "run", out, deadline=600.0, join=600.0))
        shutil.copy(SLOW_APP, out / "app" / "profcil_app.py")
        nodes = [{"client": c, "home": out / "sites", "slow": slow * (c == CLIENTS - 1)} for c in range(CLIENTS)]
        with LocalCluster(out / "cluster") as cluster:
            start_federation(cluster, out / "app", nodes, worker=True)
            wait_until_finished(cluster, out / "run")
    facts = json.loads((out / "run" / "run.json").read_text())
    return {"seconds": facts["seconds"], **facts["metrics"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--slow", type=float, default=30.0, help="seconds that each turn of the slow client takes longer"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--set", action="append", default=[], dest="sets")
    args = parser.parse_args()
    for seed in args.seeds:
        for name, more in (("synchronous", []), ("buffered", ["clock.mode=buffer"])):
            out = args.out.absolute() / f"{name}-{seed}"
            found = run(config_of([*args.sets, *more], seed), out, args.slow)
            print(f"seed {seed}, {name}: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()), flush=True)
            print(describe(status(out / "run")), flush=True)


if __name__ == "__main__":
    main()
