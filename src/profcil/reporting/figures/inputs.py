"""The plain files that figures beyond scores and ledger read, and what must be in them.

RUN/snapshots.npz   one row per remembered mean: `position` [n], `kind` [n] of KINDS, `labels` [n] class ids,
                    `means` [n, d], `oracle` [n, d] the true mean of that class under the model of that position;
                    where wanted also `real` [m, d], some real features, and `real_position` [m]
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


def snapshots(run: Path) -> dict[str, np.ndarray]:
    """The memory of a run as it was at several positions."""
    path = run / "snapshots.npz"
    advice = f"`profcil diagnose {run}` writes it where the run was made with --set keep_memories=true"
    found = arrays(path, "position", "kind", "labels", "means", "oracle", advice=advice)
    n = len(found["position"])
    same = found["means"].ndim == 2 and found["means"].shape == found["oracle"].shape
    if not same or not n == len(found["kind"]) == len(found["labels"]) == len(found["means"]) > 0:
        raise broken(path, "its arrays do not have the same number of rows, at least one")
    strange = sorted(set(found["kind"].tolist()) - set(KINDS))
    if strange:
        raise broken(path, f"it has kind '{strange[0]}', allowed are {', '.join(KINDS)}")
    return found | some_real(path, found["means"].shape[1])


def some_real(path: Path, width: int) -> dict[str, np.ndarray]:
    """The real features of a snapshot; none where the file has none."""
    with np.load(path, allow_pickle=False) as stored:
        if "real" not in stored.files:
            return {"real": np.zeros((0, width)), "real_position": np.zeros(0, dtype=np.int64)}
    real = arrays(path, "real", "real_position", advice="")
    if real["real"].shape != (len(real["real_position"]), width):
        raise broken(path, "its real features have another width than the means, or not a position per row")
    return real


def replay(run: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Real and replayed features of a run in one space, and what is known about them."""
    path = run / "replay.npz"
    names = ("real", "replay", "real_label", "replay_label")
    found = arrays(path, *names, "attrs", advice=f"`profcil diagnose {run}` writes it for methods that replay")
    sizes = [len(found[name]) for name in names]
    fit = found["real"].ndim == found["replay"].ndim == 2 and found["real"].shape[1] == found["replay"].shape[1]
    if not fit or sizes[:2] != sizes[2:] or not all(sizes):
        raise broken(path, "real and replay features must have one width, and a label per row")
    try:
        attrs = json.loads(str(found.pop("attrs")))
        return found, {"method": str(attrs["method"]), "space": str(attrs["space"])}
    except (ValueError, KeyError, TypeError):
        raise broken(path, "its attrs must be a JSON text with method and space") from None


def mismatch(path: Path) -> list[dict[str, Any]]:
    """The runs of a weak-task study, from its folder or from the file itself."""
    path = path / "mismatch.json" if path.is_dir() else path
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        for row in rows:
            str(row["method"]), float(row["mmd2"]), float(row["drop"])
    except OSError as error:
        raise missing(path, error, "`profcil study weak-task` writes it in its folder") from None
    except (ValueError, KeyError, TypeError):
        raise broken(path, "it must be a list of runs with method, strength, mmd2 and drop") from None
    strange = sorted({str(row.get("strength")) for row in rows} - set(STRENGTHS))
    if strange or not rows:
        raise broken(path, f"strength '{strange[0]}' is none of {', '.join(STRENGTHS)}" if strange else "it is empty")
    return rows


def arrays(path: Path, *names: str, advice: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except OSError as error:
        raise missing(path, error, advice) from None
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise broken(path, str(error).strip("'\"")) from None


def missing(path: Path, error: OSError, advice: str) -> RunFolderError:
    return RunFolderError(f"{path} cannot be read ({error.strerror or error}); {advice}")


def broken(path: Path, why: str) -> RunFolderError:
    return RunFolderError(f"{path} is not what this figure reads ({why}); write it again")
