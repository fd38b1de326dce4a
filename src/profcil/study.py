"""A study: one TOML of datasets, settings, methods, seeds and variants; every cell one run, kept and reused.

A run's folder is named by a hash of everything that determines its result, so a study continues where it was, two
studies share runs, and a changed setting is a new run. A run that fails does not stop the rest.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from profcil import __version__
from profcil.config import Checked, build, plain
from profcil.errors import unknown
from profcil.resolve import RunConfig, load_toml, resolve, to_toml

STUDIES = Path(__file__).parent / "recipes" / "studies"
FREE = ("device", "threads", "workers", "executor")  # what no result depends on, beyond rounding


@dataclass(frozen=True)
class Variant(Checked):
    """A named way to set some methods up."""

    name: str = ""
    methods: tuple[str, ...] = ()  # empty: all of the study's
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study(Checked):
    """The cells of a study."""

    title: str = ""
    datasets: tuple[str, ...] = ("digits",)
    settings: tuple[str, ...] = ("severe",)
    methods: tuple[str, ...] = ("fedavg", "fedprox", "pro", "promax")
    seeds: tuple[int, ...] = (0,)
    set: tuple[str, ...] = ()
    diagnose: bool = False
    variants: tuple[dict, ...] = field(default=({},))


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    config: RunConfig
    variant: str

    @property
    def key(self) -> str:
        facts = {k: v for k, v in plain(self.config).items() if k not in FREE} | {"version": __version__}
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def label(self) -> str:
        return f"{self.config.method} ({self.variant})" if self.variant else self.config.method

    @property
    def name(self) -> str:
        c = self.config
        return f"{c.dataset}-{c.setting}-{c.method}-seed{c.seed}-{self.key}"


def load_study(name: str) -> Study:
    """A study by built-in name or by path."""
    path = Path(name)
    if path.suffix != ".toml":
        known = sorted(p.stem for p in STUDIES.glob("*.toml"))
        if name not in known:
            raise unknown("study", name, known)
        path = STUDIES / f"{name}.toml"
    return build(Study, load_toml(path), "the study")


def cells(study: Study) -> list[Cell]:
    """Every run of a study, in the order of its axes."""
    out = []
    for raw, dataset, setting in product(study.variants, study.datasets, study.settings):
        variant = build(Variant, raw, "a variant")
        for method, seed in product(variant.methods or study.methods, study.seeds):
            flags = {"dataset": dataset, "setting": setting, "method": method, "seed": seed}
            out.append(Cell(resolve(None, flags, [*study.set, *variant.set]), variant.name))
    return out


def play(
    todo: Iterable[Cell], out: Path, data: Path, jobs: int, diagnose: bool, tell: Callable[[Cell, str], None]
) -> int:
    """Runs what is not there yet, `jobs` processes at a time; the number of failures."""
    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(lambda cell: not _one(cell, out, data, jobs, diagnose, tell), todo))


def _one(cell: Cell, out: Path, data: Path, jobs: int, diagnose: bool, tell: Callable[[Cell, str], None]) -> bool:
    folder = out / cell.name
    record = read_json(folder / "run.json")
    if not record.get("done"):
        if record:
            command = ["resume", str(folder), "--data-dir", str(data), "--quiet", "--json"]
        else:
            recipe = out / f"{cell.name}.toml"
            recipe.write_text(to_toml(cell.config))
            alone = ["--set", "workers=1"] if jobs > 1 else []
            command = ["run", str(recipe), "--out", str(folder), "--data-dir", str(data), "--quiet", "--json", *alone]
        tell(cell, "started")
        if not _call(cell, command, tell):
            return False
    looked = not diagnose or (folder / "diagnostics.json").exists()
    looked = looked or _call(cell, ["diagnose", str(folder), "--data-dir", str(data), "--json"], tell)
    if looked:
        tell(cell, "done")
    return looked


def _call(cell: Cell, command: list[str], tell: Callable[[Cell, str], None]) -> bool:
    done = subprocess.run([sys.executable, "-m", "profcil", *command], capture_output=True, text=True)
    if done.returncode:
        tell(cell, (done.stderr.strip().splitlines() or ["failed"])[-1])
    return done.returncode == 0


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
