"""Reads and checks the files that some figures need in addition to scores and ledger.

RUN/snapshots.npz   one row per stored mean: `position` [n], `kind` [n] of KINDS, `labels` [n] class ids,
                    `means` [n, d], `oracle` [n, d] the true mean of that class under the model of that position;
                    optionally `real` [m, d], some real features, and `real_position` [m]
RUN/replay.npz      `real` [n, d], `real_label` [n], `replay` [m, d], `replay_label` [m] in one evaluation space;
                    `attrs` a JSON text with `space` and `method`
mismatch.json       of a study: a list of {method, strength, seed, task, mmd2, w1, cosine, weak_accuracy, drop}
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from profcil.errors import RunFolderError

KINDS = ("refreshed", "stale", "aligned")
STRENGTHS = ("mild", "medium", "severe")


def read_snapshots(run: Path) -> dict[str, np.ndarray]:
    """The stored means of a run at several positions."""
    path = run / "snapshots.npz"
    advice = f"`profcil diagnose {run}` writes it if the run was made with --set keep_memories=true"
    arrays = read_arrays(path, "position", "kind", "labels", "means", "oracle", advice=advice)
    lengths = {len(arrays[name]) for name in ("position", "kind", "labels", "means")}
    means = arrays["means"]
    same_shape = means.ndim == 2 and means.shape == arrays["oracle"].shape
    if not same_shape or len(lengths) > 1 or 0 in lengths:
        raise invalid_file(path, "its arrays do not have the same number of rows, at least one")
    unknown = sorted(set(arrays["kind"].tolist()) - set(KINDS))
    if unknown:
        raise invalid_file(path, f"it has kind '{unknown[0]}', allowed are {', '.join(KINDS)}")
    return arrays | read_real_features(path, width=means.shape[1])


def read_real_features(path: Path, width: int) -> dict[str, np.ndarray]:
    """The real features of a snapshot file; empty arrays if it has none."""
    with np.load(path, allow_pickle=False) as stored:
        if "real" not in stored.files:
            return {"real": np.zeros((0, width)), "real_position": np.zeros(0, dtype=np.int64)}
    arrays = read_arrays(path, "real", "real_position", advice="")
    if arrays["real"].shape != (len(arrays["real_position"]), width):
        raise invalid_file(path, "its real features must be as wide as the means, with a position for each row")
    return arrays


def read_replay(run: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Real and replayed features of a run in one space, and the names of method and space."""
    path = run / "replay.npz"
    names = ("real", "replay", "real_label", "replay_label")
    advice = f"`profcil diagnose {run}` writes it for methods that replay"
    arrays = read_arrays(path, *names, "attrs", advice=advice)
    real = arrays["real"]
    replay = arrays["replay"]
    are_matrices = real.ndim == replay.ndim == 2
    same_width = are_matrices and real.shape[1] == replay.shape[1]
    real_labelled = len(real) == len(arrays["real_label"]) > 0
    replay_labelled = len(replay) == len(arrays["replay_label"]) > 0
    if not (same_width and real_labelled and replay_labelled):
        raise invalid_file(path, "real and replayed features must have the same width, and a label for each row")
    try:
        attributes = json.loads(str(arrays.pop("attrs")))
        return arrays, {"method": str(attributes["method"]), "space": str(attributes["space"])}
    except (ValueError, KeyError, TypeError):
        raise invalid_file(path, "its attrs must be a JSON text with method and space") from None


def read_mismatch(path: Path) -> list[dict[str, Any]]:
    """The runs of a weak-task study, from its folder or from the file itself."""
    path = path / "mismatch.json" if path.is_dir() else path
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        for row in rows:
            str(row["method"]), float(row["mmd2"]), float(row["drop"])
    except OSError as error:
        raise unreadable_file(path, error, "`profcil study weak-task` writes it in its folder") from None
    except (ValueError, KeyError, TypeError):
        raise invalid_file(path, "it must be a list of runs with method, strength, mmd2 and drop") from None
    strengths = {str(row.get("strength")) for row in rows}
    unknown = sorted(strengths - set(STRENGTHS))
    if unknown:
        raise invalid_file(path, f"it has strength '{unknown[0]}', allowed are {', '.join(STRENGTHS)}")
    if not rows:
        raise invalid_file(path, "it is empty")
    return rows


def read_arrays(path: Path, *names: str, advice: str) -> dict[str, np.ndarray]:
    """Arrays of an .npz file by name. `advice` says how to make the file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except OSError as error:
        raise unreadable_file(path, error, advice) from None
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise invalid_file(path, str(error).strip("'\"")) from None


def unreadable_file(path: Path, error: OSError, advice: str) -> RunFolderError:
    return RunFolderError(f"{path} cannot be read ({error.strerror or error}); {advice}")


def invalid_file(path: Path, reason: str) -> RunFolderError:
    return RunFolderError(f"{path} is not a valid input of this figure ({reason}); write the file again")
