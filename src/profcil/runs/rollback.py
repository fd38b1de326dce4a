"""Puts a run back to an earlier state that was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_facts
from profcil.runs.folder import RunFolder
from profcil.runs.models.saved_model import NAME as MODEL_FILE
from profcil.runs.run_files import check_folder


def roll_back(path: Path, position: int | None = None) -> dict[str, Any]:
    """Restores the state after a position, counted from 1, and the readable files that follow from it."""
    import torch

    check_folder(path)
    with RunFolder(path) as folder:
        chosen = folder.kept.restore(position, current_place(folder.path))
        (folder.path / MODEL_FILE).unlink(missing_ok=True)  # it does not follow from this state
        folder.load(torch.device("cpu"))
        kept = folder.kept.positions()
        size = sum(folder.kept.file(p).stat().st_size for p in kept)
        return {"run": str(path), "position": chosen, "kept": kept, "kept_bytes": size}


def current_place(path: Path) -> tuple[int, int]:
    """The number of scored positions and of rounds since in the last state. A damaged state counts as the last."""
    record = read_facts(path / "state.safetensors")
    try:
        return (10**9, 0) if record is None else (int(record["position"]), int(record["round"]))
    except (KeyError, TypeError, ValueError):
        raise RunFolderError(f"{path}/state.safetensors is damaged; choose a state with --to POSITION") from None
