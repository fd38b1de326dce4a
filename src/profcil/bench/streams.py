"""Whole streams of the paper's protocol, as `profcil run` plays them, and a plan for very many clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# How the first release ran: one client after another, every step as it is written, everything sent every time.
FIRST = ("--accelerate", "off", "--transfer", "full")


def stream_case(dataset: str, method: str, data: Path, device: str = "cpu", flags: tuple[str, ...] = ()) -> dict:
    """A stream under severe heterogeneity, scores included, the shared warm-up computed and timed apart."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = ["run", "--dataset", dataset, "--method", method, "--device", device, *flags]
        done = subprocess.run(
            [sys.executable, "-m", "profcil", *command, "--out", out, "--data-dir", data, "--quiet", "--json"],
            capture_output=True,
            text=True,
            env={**os.environ, "PROFCIL_CACHE": scratch},  # so that the warm-up is computed, and timed
        )
        if done.returncode:
            return {"note": done.stderr.strip().removeprefix("profcil: ")}
        row = json.loads(done.stdout)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    resident = [e["resident_mb"] for e in events if e["event"] == "position"]
    kept = {k: row[k] for k in ("warmup_seconds", "peak_memory_mb")}
    return {"ours": row["seconds"], "unit": "s", **kept, **grown(resident)}


def grown(resident: list[float]) -> dict[str, float]:
    """Resident memory after the first and the last position, where growth over rounds and tasks would show."""
    return {"resident_first_mb": resident[0], "resident_last_mb": resident[-1]}


def first_release_case(dataset: str, method: str, data: Path, repeats: int = 3, flags: tuple[str, ...] = ()) -> dict:
    """The default path against the eager sequential path of the first release, in turn; the best of some runs each."""
    paths = [flags, (*flags, *FIRST)] * repeats
    runs = [stream_case(dataset, method, data, flags=path) for path in paths]
    if failed := next((r for r in runs if "note" in r), None):
        return failed
    ours, eager = (min(runs[i::2], key=lambda r: r["ours"]) for i in (0, 1))
    return ours | {"reference": eager["ours"], "against": "the eager sequential path of the first release"}


def plan_case(clients: int, samples: int) -> dict[str, Any]:
    """A severe plan of twenty tasks of five classes."""
    import numpy as np

    from profcil.protocol.plan import make_plan
    from profcil.protocol.settings import StreamSettings

    labels = np.arange(samples) % 100
    settings = StreamSettings(clients, 100, 5, support=0.4, coverage=0.5, disorder=0.6)
    began = time.perf_counter()
    make_plan(labels, 100, settings, seed=0)
    return {"ours": time.perf_counter() - began, "unit": "s"}
