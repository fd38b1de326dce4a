"""Diagnostics of a finished run: the quality of its representation, its memory and its replay.

They are written into the run folder: diagnostics.json (probes, alignment, replay gap), snapshots.npz if the run kept
its memories, and replay.npz if the method replays samples.
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
from profcil.diagnostics import snapshots
from profcil.diagnostics.probe import nearest_mean_accuracy, ridge_accuracy
from profcil.diagnostics.replayed import EvaluationSpace, measure_replay
from profcil.engine.client import FeatureMap, embed
from profcil.engine.device import device_of
from profcil.engine.recorder import settings_of
from profcil.engine.run import MakeWorld, check_data
from profcil.engine.run_state import RunState
from profcil.engine.warmup import warm
from profcil.engine.world import World, make_world
from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_tensors, write_bytes, write_json
from profcil.methods.base import Method
from profcil.model.net import Weights
from profcil.resolve import resolve
from profcil.runs.reader import load_run
from profcil.runs.run_files import read_alignments
from profcil.runs.settings_check import check_settings
from profcil.runs.state import unpack


def diagnose(path: Path, data_dir: Path | None = None, make: MakeWorld = make_world) -> dict[str, Any]:
    """Probes of the warmed and the final base, alignment by position, and the replay gap, written into the folder.

    A base that predictions do not use has no probes.
    """
    world, state = load_finished_run(path, data_dir, make)
    warmed = warm(world, lambda *_: None).weights
    module = registry.find("methods", world.config.method)
    method = module.METHOD(world.config.params)
    warm_probe: dict[str, float] = {}
    final: dict[str, float] = {}
    if "base" in method.deployed(state.server).blocks:
        warm_probe = probe(world, lambda under: under(warmed["base"]))
        final_base = state.server.blocks["base"].tensors
        final = probe(world, lambda under: under(final_base))
    seen = final
    if type(method).views is not Method.views:  # the method classifies other features than those of the final base
        seen = probe(world, lambda under: method.views(state.server, under))
    report = {
        "probe_warm": warm_probe,
        "probe_final": final,
        "probe_seen": seen,
        "alignment": read_alignments(path),
        "replay": diagnose_replay(path, world, method, state, warmed),
    }
    points = snapshots.gather(path, world.plan.positions)
    if points is not None:
        write_arrays(path / "snapshots.npz", points)
    write_json(path / "diagnostics.json", report)
    return report


def load_finished_run(path: Path, data_dir: Path | None, make: MakeWorld = make_world) -> tuple[World, RunState]:
    """The world and the final state of a finished run. Settings and data must be those of the run."""
    if not load_run(path).done:
        raise RunFolderError(f"{path} is not a finished run; continue it with `profcil resume {path}`")
    config = resolve(str(path / "config.toml"))
    try:
        tensors, record = read_tensors(path / "state.safetensors") or ({}, {})
        state = unpack(tensors, record, device_of(config.device), path / "clients")
        saved = dict(record["facts"])
    except (LookupError, ValueError, TypeError, AttributeError):
        raise RunFolderError(f"run folder {path} has no readable state; run it again") from None
    executor = saved["config"].get("executor")
    check_settings(path, saved["config"], settings_of(config) | {"executor": executor})
    data_dir = Path(data_dir or saved["data_dir"])
    world = make(config, data_dir)
    check_data(path, world, saved, data_dir)
    return world, state


def diagnose_replay(
    path: Path, world: World, method: Method, state: RunState, warmed: Weights
) -> dict[str, Any] | None:
    """The gap between replay and real examples. The features it was computed from are written to replay.npz."""
    measured = measure_replay(EvaluationSpace(world, method, state, warmed))
    if measured is None:
        return None
    report, arrays = measured
    attributes = {"method": world.config.method, "space": report["extractor"], "fit": report["fit"]}
    encoded = np.array(json.dumps(attributes))
    write_arrays(path / "replay.npz", {**arrays, "attrs": encoded})
    return report


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write plain arrays to one npz file, atomically."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    write_bytes(path, packed.getvalue())


def probe(world: World, features: Callable[[Callable[[FeatureMap], Tensor]], Tensor]) -> dict[str, float]:
    """Closed-form accuracies in percent on some features.

    `features` is given a function that embeds the examples under given weights, and returns their features.
    """
    train = world.bundle.train
    test = world.evaluation_examples

    @torch.no_grad()
    def features_of(examples: Examples) -> Tensor:
        index = torch.arange(len(examples), device=world.device)
        return features(lambda feature_map: embed(world.net, feature_map, examples, index))

    train_features = features_of(train)
    test_features = features_of(test)
    ridge = ridge_accuracy(train_features, train.y, test_features, test.y, world.bundle.facts.classes)
    nearest_mean = nearest_mean_accuracy(train_features, train.y, test_features, test.y)
    return {"ridge": 100 * ridge, "nearest_mean": 100 * nearest_mean}
