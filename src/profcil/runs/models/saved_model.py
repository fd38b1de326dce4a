"""The model file of a finished run: everything that predictions need, and nothing that they do not.

model.safetensors holds the tensors that the method's predictions read (`Method.deployed`). Its header holds the rest:
encoder, method and their settings, shapes and scale of the inputs, how raw inputs become tensors, class names. A digest
covers both. The file needs neither the data nor the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil import __version__
from profcil.config import OwnSettings
from profcil.errors import RunFolderError
from profcil.io.atomic_files import digest, read_tensors, write_tensors
from profcil.plain_values import plain
from profcil.resolve import plugin_origins
from profcil.runs.state import pack_server

if TYPE_CHECKING:  # the functions import torch when they are called
    from torch import Tensor

    from profcil.data.bundle import Bundle, Facts, Inputs
    from profcil.engine.channel import ServerState
    from profcil.engine.world import World
    from profcil.methods.base import Method
    from profcil.resolve import RunConfig

NAME = "model.safetensors"
FORMAT = 1  # raised when older versions of profcil could not read the file
FACTS = (
    "name",
    "title",
    "modality",
    "classes",
    "views",
    "encoder",
)  # what models and methods read of a dataset's facts
PLUGINS = "plugins"
READING = ("label", "text", "ignore", "encoding")  # of own data: the settings by which new files are read, too


def save_model(folder: Path, world: World, method: Method, server: ServerState, metrics: Mapping[str, float]) -> None:
    """Writes the model that a run ended with into its folder."""
    import torch

    with torch.no_grad():
        deployed = method.deployed(server)
    tensors, blocks = pack_server(deployed)
    header = header_of(world) | reading_of(world.config.own) | code_of(world.config)
    header |= {"blocks": blocks, "clock": deployed.clock, "metrics": dict(metrics)}
    header |= {"temperature": method.temperature(deployed)}
    write_tensors(Path(folder) / NAME, tensors, header)


def header_of(world: World) -> dict[str, Any]:
    """What the file says besides tensors, as JSON values."""
    config = world.config
    bundle = world.bundle
    form = bundle.input_format
    last = world.plan.positions - 1
    inputs = [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in empty_inputs(bundle)]
    return {
        "format": FORMAT,
        "profcil": __version__,
        "dataset": config.dataset,
        "data": bundle.fingerprint,
        "method": config.method,
        "params": plain(config.params),
        "model": plain(config.model),
        "seed": config.seed,
        "facts": {name: getattr(bundle.facts, name) for name in FACTS},
        "inputs": inputs,
        "input_format": form.to_json() if form else None,
        "vocabulary": bundle.vocabulary,
        "mean": bundle.mean,
        "std": bundle.std,
        "names": bundle.names,
        "seen": sorted(world.plan.seen(last)),
    }


def reading_of(own: OwnSettings) -> dict[str, Any]:
    """The settings that say how the run's own data was read; none if they are the usual ones."""
    usual = OwnSettings()
    chosen = {name: getattr(own, name) for name in READING if getattr(own, name) != getattr(usual, name)}
    return {"reading": chosen} if chosen else {}


def code_of(config: RunConfig) -> dict[str, Any]:
    """Package, version and source hash of the plug-ins among method, dataset and encoder; none if all are built in."""
    origins = plugin_origins(config)
    return {PLUGINS: origins} if origins else {}


def empty_inputs(bundle: Bundle) -> Inputs:
    """Inputs without examples, in the shapes and types of a dataset."""
    x, *graph = bundle.train.inputs(bundle.train.y[:0])
    if not graph:
        return (x,)
    edges, nodes = graph
    return x[:0].clone(), edges[:, :0].clone(), nodes


@dataclass(frozen=True)
class SavedModel:
    """A model file that was read and checked."""

    path: Path
    tensors: Mapping[str, Tensor]
    header: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """A hash of tensors and header, which names this model."""
        return digest(self.tensors, json.dumps(self.header))


def read_model(path: Path) -> SavedModel:
    """Reads a model file. A file that is damaged, of another kind or of a newer version is a RunFolderError."""
    found = read_tensors(path)
    if found is None:
        raise RunFolderError(
            f"{path} is damaged or is not a model file; write it again with `profcil resume`, or copy it again"
        )
    tensors, header = found
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int) or "blocks" not in header or "method" not in header:
        raise RunFolderError(f"{path} is not a model file; give a run folder or its {NAME}")
    if version > FORMAT:
        raise RunFolderError(
            f"{path} was written by profcil {header.get('profcil')} in format {version}, and profcil {__version__} "
            f"reads formats up to {FORMAT}; install the newer version"
        )
    return SavedModel(path, tensors, header)


def empty_bundle(header: Mapping[str, Any]) -> Bundle:
    """A dataset without examples, from which the encoder takes shapes, vocabulary and scale of the inputs."""
    import torch

    from profcil.data.bundle import Bundle, Nodes, Rows
    from profcil.data.input_format import input_format_of_json

    x, *graph = (torch.zeros(shape, dtype=getattr(torch, kind)) for shape, kind in header["inputs"])
    y = torch.zeros(0, dtype=torch.long)
    examples = Nodes(x, graph[0], y, graph[1]) if graph else Rows(x, y)
    form = header["input_format"]
    return Bundle(
        facts_of(header),
        examples,
        examples,
        None,
        tuple(header["names"]),
        vocabulary=header["vocabulary"],
        mean=tuple(header["mean"]),
        std=tuple(header["std"]),
        fingerprint=header["data"],
        input_format=input_format_of_json(form) if form else None,
    )


def facts_of(header: Mapping[str, Any]) -> Facts:
    """The facts of the dataset, as far as a model needs them."""
    from profcil.data.bundle import Facts

    values = {name: header["facts"][name] for name in FACTS}
    return Facts(**{**values, "views": tuple(values["views"])}, train=None, test=None)
