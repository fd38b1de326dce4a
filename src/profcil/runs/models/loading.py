"""Loads the model of a finished run: from its model file, or from the state and the dataset of a run without one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil import registry
from profcil.config import ModelSettings
from profcil.errors import CodeNote, ConfigError, RunFolderError
from profcil.io.atomic_files import read_tensors
from profcil.plain_values import build
from profcil.resolve import resolve
from profcil.runs.models.saved_model import NAME, PLUGINS, SavedModel, empty_bundle, empty_inputs, read_model
from profcil.runs.models.trained_model import Model
from profcil.runs.reader import Run, load_run
from profcil.runs.state import unpack, unpack_server

if TYPE_CHECKING:  # the functions import torch when they are called
    from profcil.data.bundle import Bundle
    from profcil.methods.base import Method
    from profcil.model.net import Net

CALIBRATION = "calibration.json"  # a temperature that `profcil eval --calibrate` fitted, beside the model file


def load_model(path: str | Path, *, data: str | Path | None = None, device: str = "cpu") -> Model:
    """The model that a finished run ended with. `path` is its folder or a model file.

    A run folder of an older version has no model file. Then the run's dataset is needed; `data` is the folder to load
    it from, by default that of the run.
    """
    file = model_file(Path(path))
    if file is not None:
        return model_of_file(file, device)
    return model_of_run(load_run(path), data, device)


def model_file(path: Path) -> Path | None:
    """The model file at a path, which is itself or is in a run folder; None if there is none."""
    if path.is_file():
        return path
    return path / NAME if (path / NAME).is_file() else None


def model_of_file(file: Path, device: str) -> Model:
    """The model in a file."""
    from profcil.engine.device import device_of

    saved = read_model(file)
    where = device_of(device)
    try:
        bundle = empty_bundle(saved.header)
        net, method = net_and_method(saved.header, bundle)
        state = unpack_server(saved.tensors, saved.header["blocks"], saved.header["clock"], where)
        temperature = fitted_temperature(saved) or saved.header["temperature"]
        seen = tuple(saved.header["seen"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunFolderError(f"the header of {file} cannot be read ({reason}); write the model again") from None
    note_changed_code(saved.header)
    like = tuple(x.to(where) for x in empty_inputs(bundle))
    return Model(net.to(where), method, state, seen, bundle.names, like, bundle.input_format, temperature, saved.header)


def note_changed_code(header: Mapping[str, Any]) -> None:
    """Warns if the code of a plug-in has changed since the model was trained. Data are not needed here."""
    for kind in ("methods", "encoders"):
        trained = header.get(PLUGINS, {}).get(kind)
        name = header["method"] if kind == "methods" else header["model"]["encoder"]
        if trained and registry.origin(kind, name).get("source") != trained["source"]:
            text = f"the code of {name} has changed since this model was trained, so that it may predict differently"
            warnings.warn(text, CodeNote, stacklevel=4)


def net_and_method(header: Mapping[str, Any], bundle: Bundle) -> tuple[Net, Method]:
    """The model, still with initial weights, and the method, from the header of a model file."""
    from profcil.engine.build import make_model
    from profcil.randomness import torch_generator

    name = header["method"]
    try:
        kind = registry.find("methods", name).METHOD
        method = kind(build(kind.Params, header["params"], f"method '{name}'"))
        settings = build(ModelSettings, header["model"], "model")
        net = make_model(settings, bundle, header["seed"])
    except ConfigError as error:
        raise RunFolderError(f"the model cannot be built ({error}); install what the run had") from None
    method.attach(net, empty_inputs(bundle), torch_generator(header["seed"], "model", name))
    return net, method


def fitted_temperature(saved: SavedModel) -> float | None:
    """The temperature that was fitted for this model, if there is one beside it."""
    try:
        found = json.loads((saved.path.parent / CALIBRATION).read_text(encoding="utf-8"))
        return float(found["temperature"]) if found["model"] == saved.digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_has_data(run: Run) -> None:
    """Refuses a run from which no model can be made: it is not finished, or its dataset is not known."""
    path = run.path
    if not run.done:
        raise RunFolderError(f"{path} is not finished; continue it with `profcil resume {path}`")
    if run.config["dataset"] not in registry.names("data"):
        raise RunFolderError(
            f"{path} has no {NAME}, and its dataset '{run.config['dataset']}' is not known here; start the run again "
            "where its data is, which writes the model"
        )


def model_of_run(run: Run, data: str | Path | None, device: str) -> Model:
    """The model of a run without a model file, from its last state and its dataset."""
    import torch

    from profcil.engine.world import make_world

    path = run.path
    check_has_data(run)
    config = replace(resolve(str(path / "config.toml")), device=device)
    data_dir = Path(data or run.facts["data_dir"])
    world = make_world(config, data_dir)
    if world.bundle.fingerprint != run.facts["data"]:
        raise RunFolderError(
            f"the data under {data_dir} is not the data that {path} was trained on; give the folder of that data"
        )
    stored = read_tensors(path / "state.safetensors")
    if stored is None:
        raise RunFolderError(f"run folder {path} has no readable state; run it again")
    method = registry.find("methods", config.method).METHOD(config.params)
    with torch.no_grad():
        state = method.deployed(unpack(*stored, world.device, path / "clients").server)
    seen = tuple(sorted(world.plan.seen(world.plan.positions - 1)))
    bundle = world.bundle
    like = empty_inputs(bundle)
    about = {"method": config.method, "dataset": config.dataset, "metrics": run.metrics}
    temperature = method.temperature(state)
    return Model(world.net, method, state, seen, bundle.names, like, bundle.input_format, temperature, about)
