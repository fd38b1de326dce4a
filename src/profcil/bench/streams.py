"""What a run costs on this machine, measured: each case in a process of its own, so that peak memory is its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAN_CLIENTS = 100_000


def stream_case(dataset: str, method: str, data: Path) -> dict[str, Any]:
    """A full paper-protocol stream under severe heterogeneity, warm-up computed and timed apart."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = ["run", "--dataset", dataset, "--method", method, "--out", str(out), "--data-dir", str(data)]
        done = subprocess.run(
            [sys.executable, "-m", "profcil", *command, "--quiet", "--json"],
            capture_output=True,
            text=True,
            env=_environment(scratch),
        )
        if done.returncode:
            return {"seconds": None, "note": done.stderr.strip().removeprefix("profcil: ")}
        row = json.loads(done.stdout)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    resident = [e["resident_mb"] for e in events if e["event"] == "position"]
    return {
        "seconds": row["seconds"],
        "warmup_seconds": row["warmup_seconds"],
        "peak_memory_mb": row["peak_memory_mb"],
        "resident_first_mb": resident[0],
        "resident_last_mb": resident[-1],
    }


def plan_case() -> dict[str, Any]:
    """A severe plan for a hundred thousand clients: twenty tasks of five classes, a million examples."""
    import numpy as np

    from profcil.protocol.plan import make_plan
    from profcil.protocol.settings import StreamSettings

    labels = np.arange(1_000_000) % 100
    settings = StreamSettings(PLAN_CLIENTS, 100, 5, support=0.4, coverage=0.5, disorder=0.6)
    began = time.perf_counter()
    plan = make_plan(labels, 100, settings, seed=0)
    assert plan.clients == PLAN_CLIENTS
    return {"seconds": time.perf_counter() - began}


def cases(data: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    streams = [(d, m) for d in ("cora", "clinc150", "digits") for m in ("promax", "fedavg")]
    found = {f"{m} on {d}, severe": (lambda d=d, m=m: stream_case(d, m, data)) for d, m in streams}
    return {f"plan for {PLAN_CLIENTS:,} clients": plan_case, **found}


def _environment(scratch: str) -> dict[str, str]:
    import os

    return {**os.environ, "PROFCIL_CACHE": scratch}  # so that the warm-up is computed, and timed
