"""A whole run: world, warm-up and stream, recorded in a folder from which the run can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from profcil import registry
from profcil.engine.client_store import ClientStore
from profcil.engine.device import device_of
from profcil.engine.dictionary import DictionaryResult, find_entries, prepare_dictionary
from profcil.engine.evaluation import task_totals
from profcil.engine.loop import stream
from profcil.engine.recorder import Observer, RunRecorder, settings_of
from profcil.engine.run_state import RunState
from profcil.engine.warmup import WarmupResult, warm
from profcil.engine.world import World, make_world
from profcil.errors import Failure, ProfcilError, RunFolderError
from profcil.io.interrupts import ignore_interrupts
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.privacy.meter import BudgetSpent
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig, resolve
from profcil.runs.folder import RunFolder
from profcil.runs.models.saved_model import NAME as MODEL_FILE
from profcil.runs.settings_check import check_settings


class Interrupted(Failure):
    """The run was stopped by Ctrl-C. Everything up to the last complete round is saved."""


MakeWorld = Callable[[RunConfig, Path], World]  # from the settings and the place of the data


def start(
    config: RunConfig,
    out: Path,
    data_dir: Path,
    observe: Observer = lambda p: None,
    make: MakeWorld | None = None,
) -> Path:
    """Starts a new run in a new folder and computes it to its end."""
    with RunFolder(out) as folder:
        folder.check_new()
        world = prepare(config, data_dir, folder, make)
        folder.begin(config, world.plan)
        recorder = RunRecorder(world, folder, observe, data_dir)
        method = registry.find("methods", config.method).METHOD(config.params)
        try:
            warmed = warm(world, recorder.watch)
            dictionary = prepare_dictionary(world, method, recorder.watch, find_entries)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted before the stream, when {out} had no saved state yet; "
                "start it again with the same command"
            ) from None
        recorder.began = time.perf_counter()  # the stream's seconds do not include the stages before it
        recorder.facts |= {"warmup_seconds": warmed.seconds, "warmup_cached": warmed.cached}
        recorder.facts |= {"dictionary_seconds": dictionary.seconds}
        recorder.hold(first_state(world, method, warmed, dictionary, folder))
        recorder.save()
        folder.wait_until_written()  # from here on a run that is killed can be resumed
        return finish(recorder, method)


def first_state(
    world: World, method: Any, warmed: WarmupResult, dictionary: DictionaryResult, folder: RunFolder
) -> RunState:
    """The state of a run before the first round."""
    scores = Scores.empty(world.plan.positions, task_totals(world))
    ledger = Ledger([*warmed.ledger.entries, *dictionary.ledger.entries])
    with torch.no_grad():
        server = method.begin(dictionary.added_to(warmed.weights))
    private = ClientStore(folder.clients, world.device)
    return RunState(server, scores, ledger, private=private)


def resume(
    path: Path,
    data_dir: Path | None = None,
    observe: Observer = lambda p: None,
    make: MakeWorld | None = None,
) -> Path:
    """Continues a run from its last saved state. A finished run is not changed, but for a model file that it lacks."""
    config = recorded_config(path)
    with RunFolder(path) as folder:
        state, events, saved = folder.load(device_of(config.device))
        check_settings(folder.path, saved["config"], settings_of(config))
        plan_is_valid = has_plan(folder.path, saved["plan"])
        if saved["done"] and plan_is_valid and (folder.path / MODEL_FILE).exists():
            return folder.path
        check_method_source(folder.path, config, saved)
        data_dir = Path(data_dir or saved["data_dir"])
        try:
            recorder = RunRecorder(prepare(config, data_dir, folder, make), folder, observe, data_dir)
            check_data(Path(path), recorder.world, saved, data_dir)
        except ProfcilError:
            if saved["done"] and plan_is_valid:  # only the model is missing, and the data that it needs
                return folder.path
            raise
        if not plan_is_valid:
            folder.begin(config, recorder.world.plan, events)
        recorder.hold(state, events)
        recorder.continue_from(saved)
        method = registry.find("methods", config.method).METHOD(config.params)
        return finish(recorder, method)


def recorded_config(path: Path) -> RunConfig:
    """The settings of the run in a folder."""
    config_file = Path(path) / "config.toml"
    if not config_file.exists():
        raise RunFolderError(
            f"{path} is not a run folder (it has no config.toml); give the folder that `profcil run` printed"
        )
    return resolve(str(config_file))


def check_method_source(path: Path, config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Refuses a method from a file, or from Python, that has changed since the run began."""
    begun = saved.get("plugins", {}).get("methods", {})
    unpackaged = begun and not begun["package"]
    if unpackaged and begun != registry.origin("methods", config.method):
        raise RunFolderError(
            f"the method {config.method} has changed since {path} began; restore it, or start a new run with another "
            "--out"
        )


def has_plan(path: Path, digest: str) -> bool:
    """Whether the folder's plan file is readable and has this digest, which is saved with the state."""
    try:
        return Plan.load(path / "plan.npz").digest == digest
    except ProfcilError:
        return False


def check_data(path: Path, world: World, saved: Mapping[str, Any], data_dir: Path) -> None:
    """Refuses data other than that which the run began with, and a plan other than its plan."""
    same_data = world.bundle.fingerprint == saved["data"]
    same_plan = world.plan.digest == saved["plan"]
    if not (same_data and same_plan):
        raise RunFolderError(f"the data under {data_dir} is not what {path} began with; give the same --data-dir")


def prepare(config: RunConfig, data_dir: Path, folder: RunFolder, make: MakeWorld | None = None) -> World:
    """Builds the world and checks that the disk has enough free space for the run."""
    world = (make or make_world)(config, data_dir)
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in world.net.state_dict().values())
    folder.check_space(model_bytes)
    return world


def finish(recorder: RunRecorder, method: Any) -> Path:
    """Computes the rest of the stream. Saves the last complete round if it is interrupted."""
    try:
        if not recorder.facts.get("done"):
            stream(recorder.world, method, recorder.state, recorder.watch)
            recorder.folder.wait_until_written()
        recorder.save_model(method)
    except BudgetSpent:
        recorder.save()
        recorder.folder.wait_until_written()
        raise
    except KeyboardInterrupt:
        with ignore_interrupts():
            recorder.save()
            recorder.folder.wait_until_written()
        raise Interrupted(
            f"interrupted; everything up to the last whole round is saved, "
            f"continue with `profcil resume {recorder.folder.path}`"
        ) from None
    return recorder.folder.path
