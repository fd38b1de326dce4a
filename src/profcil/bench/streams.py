"""Whole streams of the paper's protocol by `profcil run`, and a plan for very many clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

# The settings of the first release: one client after another, eager steps, all blocks sent in every round.
FIRST_RELEASE = ("--accelerate", "off", "--transfer", "full")


def stream_case(dataset: str, method: str, data: Path, device: str = "cpu", flags: tuple[str, ...] = ()) -> dict:
    """Seconds of a stream under severe heterogeneity, including evaluation. The warm-up is timed separately."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "profcil", "run", "--dataset", dataset, "--method", method]
        command += ["--device", device, *flags, "--out", str(out), "--data-dir", str(data), "--quiet", "--json"]
        env = {**os.environ, "PROFCIL_CACHE": scratch}  # an empty cache, so that the warm-up is computed and timed
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            return {"note": done.stderr.strip().removeprefix("profcil: ")}
        row = json.loads(done.stdout)
        events = read_events(out)
    measured = {key: row[key] for key in ("warmup_seconds", "peak_memory_mb")}
    return {"ours": row["seconds"], "unit": "s", **measured, **first_and_last(events)}


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run folder."""
    text = (folder / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def first_and_last(events: list[dict[str, Any]]) -> dict[str, float]:
    """Resident memory after the first and the last position. A difference shows growth over rounds and tasks."""
    resident = [e["resident_mb"] for e in events if e["event"] == "position"]
    return {"resident_first_mb": resident[0], "resident_last_mb": resident[-1]}


def first_release_case(dataset: str, method: str, data: Path, repeats: int = 3, flags: tuple[str, ...] = ()) -> dict:
    """The default path against the eager sequential path of the first release: the best of several runs each.

    Both paths are run alternately, so that a load on the machine affects both.
    """
    first_release = (*flags, *FIRST_RELEASE)
    paths = [flags, first_release] * repeats
    rows = [stream_case(dataset, method, data, flags=path) for path in paths]
    failed = next((row for row in rows if "note" in row), None)
    if failed:
        return failed
    ours = min(rows[0::2], key=itemgetter("ours"))
    eager = min(rows[1::2], key=itemgetter("ours"))
    return ours | {"reference": eager["ours"], "against": "the eager sequential path of the first release"}


def plan_case(clients: int, samples: int) -> dict[str, Any]:
    """Seconds to make a severe plan of twenty tasks of five classes."""
    import numpy as np

    from profcil.protocol.plan_making import make_plan
    from profcil.protocol.settings import StreamSettings

    labels = np.arange(samples) % 100
    settings = StreamSettings(clients, 100, 5, support=0.4, coverage=0.5, disorder=0.6)
    began = time.perf_counter()
    make_plan(labels, 100, settings, seed=0)
    seconds = time.perf_counter() - began
    return {"ours": seconds, "unit": "s"}
