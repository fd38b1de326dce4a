"""Why did a run end where it did? The representation's own quality beside what the method made of it.

Written into the run folder: diagnostics.json (probes, alignment, replay gap), snapshots.npz where the run kept its
memories, and replay.npz where the method can show what it replays.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil import registry
from profcil.data.bundle import Examples
from profcil.diagnostics import replayed, snapshots
from profcil.diagnostics.probe import nearest_mean_accuracy, ridge_accuracy
from profcil.engine.client import Lens, embed
from profcil.engine.loop import RunState
from profcil.engine.run import check_data, settings_of
from profcil.engine.warmup import warm
from profcil.engine.world import World, device_of, make_world
from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_tensors, write_bytes, write_json
from profcil.methods.base import Method
from profcil.model.net import Weights
from profcil.resolve import resolve
from profcil.runs.reader import load_run, read_alignments
from profcil.runs.settings_check import check_settings
from profcil.runs.state import unpack


def diagnose(path: Path, data_dir: Path | None = None) -> dict[str, Any]:
    """Probes of the warmed and the final base, alignment by position, and what is replayed; kept in the folder."""
    world, state = finished_run(path, data_dir)
    warmed = warm(world, lambda *_: None).weights
    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    final = probe(world, lambda under: under(state.server.blocks["base"].tensors))
    more = type(method).views is not Method.views  # than the final base's features
    seen = probe(world, lambda under: method.views(state.server, under)) if more else final
    report = {
        "probe_warm": probe(world, lambda under: under(warmed["base"])),
        "probe_final": final,
        "probe_seen": seen,
        "alignment": read_alignments(path),
        "replay": replay(path, world, method, state, warmed),
    }
    found = snapshots.gather(path, world.plan.positions)
    if found is not None:
        write_arrays(path / "snapshots.npz", found)
    write_json(path / "diagnostics.json", report)
    return report


def finished_run(path: Path, data_dir: Path | None) -> tuple[World, RunState]:
    """The world of a finished run and the state it ended in, which is the truth about both."""
    if not load_run(path).done:
        raise RunFolderError(f"{path} is not a finished run; go on with `profcil resume {path}`")
    config = resolve(str(path / "config.toml"))
    try:
        tensors, record = read_tensors(path / "state.safetensors") or ({}, {})
        state = unpack(tensors, record, device_of(config.device), path / "clients")
        saved = dict(record["facts"])
    except (LookupError, ValueError, TypeError, AttributeError):
        raise RunFolderError(f"run folder {path} has no readable state; run it again") from None
    check_settings(path, saved["config"], settings_of(config) | {"executor": saved["config"].get("executor")})
    data_dir = Path(data_dir or saved["data_dir"])
    world = make_world(config, data_dir)
    check_data(path, world, saved, data_dir)
    return world, state


def replay(path: Path, world: World, method: Method, state: RunState, warmed: Weights) -> dict[str, Any] | None:
    """The gap between replay and reality, and the features behind it as replay.npz."""
    found = replayed.examine(replayed.Eye(world, method, state, warmed))
    if found is None:
        return None
    report, arrays = found
    about = {"method": world.config.method, "space": report["extractor"], "fit": report["fit"]}
    write_arrays(path / "replay.npz", {**arrays, "attrs": np.array(json.dumps(about))})
    return report


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Plain arrays in one file, all of them or nothing."""
    np.savez_compressed(packed := io.BytesIO(), **arrays)  # type: ignore[arg-type]
    write_bytes(path, packed.getvalue())


def probe(world: World, features: Callable[[Callable[[Lens], Tensor]], Tensor]) -> dict[str, float]:
    """Closed-form accuracies in percent on features, which are given a way to look at examples."""
    train, judged = world.bundle.train, world.judged

    @torch.no_grad()
    def seen(examples: Examples) -> Tensor:
        index = torch.arange(len(examples), device=world.device)
        return features(lambda lens: embed(world.net, lens, examples, index))

    a, b = seen(train), seen(judged)
    ridge = ridge_accuracy(a, train.y, b, judged.y, world.bundle.facts.classes)
    return {"ridge": 100 * ridge, "nearest_mean": 100 * nearest_mean_accuracy(a, train.y, b, judged.y)}
