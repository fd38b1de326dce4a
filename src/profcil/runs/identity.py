"""Which runs are the same: equal settings, data and code. Studies and `profcil run` reuse finished ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import profcil
from profcil import __version__, registry
from profcil.config import OWN
from profcil.errors import DataError, RunFolderError
from profcil.resolve import RunConfig, plugin_origins, values_of
from profcil.runs.reader import load_run

# Settings without effect on a result, beyond rounding. `regime` only changes settings of the method, which count.
WITHOUT_EFFECT = ("threads", "workers", "accelerate", "regime")
WITHOUT_ROUNDING = ("threads", "workers", "regime")  # settings without effect on a single bit


def hash_settings(config: RunConfig, exclude: Sequence[str] = WITHOUT_EFFECT) -> str:
    """A hash of everything except the data that determines a result.

    The kind of device counts, because a GPU draws other random numbers than a CPU; the index of the GPU does not. For
    plug-ins, version and source count too.
    """
    facts = {key: value for key, value in values_of(config).items() if key not in (*exclude, "device")}
    facts["version"] = __version__
    device_kind = config.device.partition(":")[0]
    if "device" not in exclude and device_kind != "cpu":
        facts["device"] = device_kind
    origins = plugin_origins(config)
    if origins:
        facts["brought"] = origins
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged or holds something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@cache
def source_digest() -> str:
    """A hash of the source of this package: a version may have been edited."""
    folder = Path(profcil.__file__).parent
    return registry.digest_of(sorted(folder.rglob("*.py")))


def run_identity(config: RunConfig) -> dict[str, str]:
    """What a run records, so that an equal one can be found: its settings and the code that computes it."""
    settings = hash_settings(config, WITHOUT_ROUNDING)
    return {"settings": settings, "source": source_digest(), "torch": version("torch")}


def find_equal_run(config: RunConfig, folders: Iterable[Path], data_dir: Path) -> Path | None:
    """A finished run among folders with the settings, the code and the data that a new run would have.

    Deployments are not searched. A run of a method class that was given from Python is never found: what the class uses
    may have changed.
    """
    if config.method in registry.GIVEN_METHODS:
        return None
    identity = run_identity(config)
    finished = {}
    for path in folders:
        facts = read_json(path / "run.json")
        if facts.get("identity") == identity and facts.get("done") and not is_deployed(facts):
            finished[path] = facts.get("data")
    if not finished:
        return None
    data = current_fingerprint(config, data_dir)
    return next((path for path, trained_on in finished.items() if trained_on == data and is_readable(path)), None)


def is_readable(path: Path) -> bool:
    """Whether the files of a run are what it wrote."""
    try:
        load_run(path)
    except RunFolderError:
        return False
    return True


def is_deployed(facts: dict[str, Any]) -> bool:
    """Whether a run was computed by clients of a deployment, some of which may have been absent."""
    return "deployed" in facts.get("config", {})


def run_folders_below(folder: Path) -> list[Path]:
    """The run folders in a folder, and in the folders in it (of studies and sweeps)."""
    files = [*folder.glob("*/run.json"), *folder.glob("*/*/run.json")]
    return sorted(file.parent for file in files)


def current_fingerprint(config: RunConfig, data_dir: Path) -> str | None:
    """The fingerprint of a run's data as it is now; None if it cannot be loaded."""
    from profcil.data.loading import load_bundle

    own = (config.own,) if config.dataset == OWN else ()
    try:
        return load_bundle(config.dataset, data_dir, config.seed, *own).fingerprint
    except DataError:
        return None
