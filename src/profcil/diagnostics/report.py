"""Why did a run end where it did? The representation's own quality beside what the method made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from profcil.diagnostics.probe import nearest_mean_accuracy, ridge_accuracy
from profcil.encoders.model import Weights
from profcil.engine.client import embed
from profcil.engine.files import read_tensors, write_json
from profcil.engine.folder import unpack
from profcil.engine.warmup import warm
from profcil.engine.world import World, make_world
from profcil.errors import RunFolderError
from profcil.reporting.runs import alignments
from profcil.resolve import resolve


def diagnose(path: Path, data_dir: Path | None = None) -> dict[str, Any]:
    """Probes of the warmed and the final base, and alignment by position; kept in the run folder."""
    run = json.loads((path / "run.json").read_text()) if (path / "run.json").exists() else {}
    if not run.get("done"):
        raise RunFolderError(f"{path} is not a finished run; give a folder whose run has ended")
    world = make_world(resolve(str(path / "config.toml")), Path(data_dir or run["data_dir"]))
    found = read_tensors(path / "state.safetensors")
    if found is None:
        raise RunFolderError(f"run folder {path} has no readable state; run it again")
    final = unpack(*found, world.device).server.weights()
    report = {
        "probe_warm": probe(world, warm(world, lambda *_: None).weights),
        "probe_final": probe(world, final),
        "alignment": alignments(path),
    }
    write_json(path / "diagnostics.json", report)
    return report


def probe(world: World, weights: Weights) -> dict[str, float]:
    """Closed-form accuracies on the base's features, in percent."""
    train, judged = world.bundle.train, world.judged
    a, b = (embed(world.net, weights["base"], e, torch.arange(len(e), device=world.device)) for e in (train, judged))
    ridge = ridge_accuracy(a, train.y, b, judged.y, world.bundle.facts.classes)
    return {"ridge": 100 * ridge, "nearest_mean": 100 * nearest_mean_accuracy(a, train.y, b, judged.y)}
