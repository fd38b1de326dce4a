"""How long runs will take, from the seconds of runs that are finished: in the folder of a study, or in a results store.

A speed is seconds per round and local epoch. Warm-ups are not included, because runs share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from profcil.errors import StoreError
from profcil.runs.identity import read_json
from profcil.runs.settings_check import flatten_settings
from profcil.studies.definition import Cell

Speeds = dict[tuple[str, str, str], float]  # by dataset, method ("" = all of them) and kind of machine


def estimate_seconds(cells: Iterable[Cell], out: Path, jobs: int = 1, store: Path | None = None) -> tuple[float, int]:
    """The seconds that some runs will take, and the number of runs without an estimate.

    What is known of the same dataset, method and kind of machine (CPU or GPU) counts first: from finished runs in this
    folder, else from rows of the results store. Else it is what all methods in the folder take on the dataset.
    """
    here = measure_speeds(out)
    stored = stored_speeds(store) if store else {}
    total = 0.0
    unknown = 0
    for cell in cells:
        c = cell.config
        kind = kind_of(c.device)
        exact = (c.dataset, c.method, kind)
        speed = here.get(exact, stored.get(exact, here.get((c.dataset, "", kind))))
        if speed is None:
            unknown += 1
        else:
            total += speed * c.train.rounds * c.train.epochs
    return total / jobs, unknown


def kind_of(device: str) -> str:
    """The kind of machine that a device is on: cpu or cuda, without the number of the GPU."""
    return device.partition(":")[0]


def measure_speeds(out: Path) -> Speeds:
    """Mean speeds of the finished runs in a folder, by method and over all methods."""
    measured: dict[tuple[str, str, str], list[float]] = {}
    for path in sorted(out.glob("*/run.json")):
        facts = read_json(path)
        with suppress(LookupError, TypeError, AttributeError, ArithmeticError):  # damaged files are skipped
            if facts.get("done"):
                c = facts["config"]
                speed = speed_of(facts["seconds"], c)
                for method in (c["method"], ""):
                    key = (c["dataset"], method, kind_of(c.get("device", "cpu")))
                    measured.setdefault(key, []).append(speed)
    return {key: fmean(speeds) for key, speeds in measured.items()}


def stored_speeds(store: Path) -> Speeds:
    """Mean speeds of the rows of a results store, by method. A store that is missing or damaged has none."""
    from profcil.runs.results.store import load_store

    measured: dict[tuple[str, str, str], list[float]] = {}
    with suppress(StoreError):
        for run in load_store(store):
            v = run.values
            with suppress(LookupError, TypeError, ArithmeticError):  # seconds may be unknown
                speed = speed_of(v["seconds"], flatten_settings(run.config))
                measured.setdefault((v["dataset"], v["method"], kind_of(v["device"] or "cpu")), []).append(speed)
    return {key: fmean(speeds) for key, speeds in measured.items()}


def speed_of(seconds: float, settings: Mapping[str, Any]) -> float:
    """Seconds per round and local epoch, given settings by their dotted names."""
    return seconds / (int(settings["train.rounds"]) * int(settings["train.epochs"]))
