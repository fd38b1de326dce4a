"""The global model of a finished run, deciding as its method does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profcil import registry
from profcil.data.bundle import Examples, Inputs, Nodes, Rows
from profcil.engine.client import embed
from profcil.engine.payload import ServerState
from profcil.engine.world import make_world
from profcil.errors import DataError, RunFolderError
from profcil.io.atomic_files import read_tensors
from profcil.methods.base import Method
from profcil.model.net import Net
from profcil.resolve import resolve
from profcil.runs.folder import unpack
from profcil.runs.reader import load_run


class Model:
    """What a run has learned. Called with inputs it gives class ids.

    Images are uint8 [n, channels, height, width], texts are token ids [n, length], a graph is its node features and
    edges [2, edges], and the nodes asked about where these are not all. Arrays do as well as tensors.
    """

    def __init__(
        self, net: Net, method: Method, state: ServerState, seen: tuple[int, ...], names: tuple[str, ...], like: Inputs
    ) -> None:
        self.net, self.method, self.state = net, method, state
        self.seen = seen  # class ids that the stream has introduced: nothing else is predicted
        self.names = names  # of all classes, by class id
        self.like = like  # inputs of no example: shapes and types

    def __call__(self, *inputs: Any) -> Tensor:
        """Class ids, one for each example."""
        return self.scores(*inputs).argmax(1)

    @torch.no_grad()
    def scores(self, *inputs: Any) -> Tensor:
        """The method's own scores, one row for each example and one column for each class; a class that the stream
        has not introduced has -inf."""
        examples = self.examples(*inputs)
        index = torch.arange(len(examples), device=examples.y.device)
        features = self.method.views(self.state, lambda lens: embed(self.net, lens, examples, index))
        self.net.load(self.state.weights())
        self.net.eval()
        scores = self.method.scores(self.net, self.state, features)
        unseen = torch.ones(self.net.classes, dtype=torch.bool, device=scores.device)
        unseen[list(self.seen)] = False
        return scores.masked_fill(unseen, -torch.inf)

    def examples(self, *inputs: Any) -> Examples:
        """The inputs as the data room has them; labels are of no use here."""
        device = next(self.net.parameters()).device
        given = [torch.as_tensor(x).to(device) for x in inputs]
        if len(self.like) == 3 and len(given) == 2:
            given.append(torch.arange(len(given[0]), device=device))
        for i, like in enumerate(self.like):
            x = given[i] if i < len(given) else None
            graph = i == 1 and len(self.like) == 3  # edges: two rows, and any number of columns
            fits = x is not None and x.dtype == like.dtype and x.dim() == like.dim()
            if x is None or not fits or (x.shape[:1] != like.shape[:1] if graph else x.shape[1:] != like.shape[1:]):
                shape = [2, "n"] if graph else ["n", *like.shape[1:]]
                told = f"{tuple(x.shape)} of {x.dtype}" if x is not None else "nothing"
                raise DataError(f"input {i + 1} is {told}; this model takes {shape} of {like.dtype}".replace("'", ""))
        y = torch.zeros(len(given[-1]), dtype=torch.long, device=device)
        return Nodes(given[0], given[1], y, given[2]) if len(self.like) == 3 else Rows(given[0], y)


def load_model(path: str | Path, *, data: str | Path | None = None, device: str = "cpu") -> Model:
    """The model that a finished run ended with. The run's data must be there: the encoder's shape and the scale of its
    inputs come from it. It is looked for where the run found it, unless `data` says otherwise."""
    run = load_run(path)
    if not run.done:
        raise RunFolderError(f"{path} is not finished; go on with `profcil resume {path}`")
    config = replace(resolve(str(run.path / "config.toml")), device=device)
    where = Path(data or run.facts["data_dir"])
    world = make_world(config, where)
    if world.bundle.fingerprint != run.facts["data"]:
        raise RunFolderError(f"the data under {where} is not what {path} was made from; give the folder it lies in")
    found = read_tensors(run.path / "state.safetensors")
    if found is None:
        raise RunFolderError(f"run folder {path} has no readable state; run it again")
    state = unpack(*found, world.device, run.path / "clients").server
    method = registry.find("methods", config.method).METHOD(config.params)
    seen = tuple(sorted(world.plan.seen(world.plan.positions - 1)))
    x, *graph = world.bundle.train.inputs(world.bundle.train.y[:0])
    like = (x[:0].clone(), graph[0][:, :0].clone(), graph[1]) if graph else (x,)
    return Model(world.net, method, state, seen, world.bundle.names, like)
