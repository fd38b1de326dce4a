"""Exports a trained model: as its own file, or as ONNX from raw tensors to probabilities.

The ONNX graph holds everything: scale of the inputs, encoder, dictionary, head, temperature. Its metadata hold class
names and input format. The number of examples is free.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from profcil.data.bundle import Inputs
from profcil.engine.channel import Block
from profcil.engine.client import BlockFeatures, FeatureMap
from profcil.errors import ConfigError, NotApplicable, RunFolderError
from profcil.io.atomic_files import write_bytes
from profcil.runs.models.loading import model_file
from profcil.runs.models.saved_model import read_model
from profcil.runs.models.trained_model import KINDS, Model, probabilities_of

EXAMPLES = 3  # in the batch that the export follows through the model
INPUTS = {
    "image": ("images",),
    "text": ("tokens",),
    "table": ("rows",),
    "graph": ("features", "edges", "nodes"),  # of all nodes; [2, edges], each in both directions; those to classify
}
OUTPUT = "probabilities"


def export_file(path: Path, target: Path) -> None:
    """Copies the model file of a run."""
    file = model_file(path)
    if file is None:
        raise RunFolderError(f"{path} has no model file; write it with `profcil resume {path}`")
    read_model(file)  # refuses a damaged one
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.part")
    shutil.copyfile(file, draft)
    draft.replace(target)


class Prediction(nn.Module):
    """The whole prediction as one module: inputs to probabilities."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        model.net.load(model.state.weights())
        self.net = model.net.eval()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)

    def predict(self, *inputs: Tensor) -> Tensor:
        model = self.model
        features = model.method.views(model.state, lambda feature_map: self.features(feature_map, inputs))
        scores = model.method.scores(self.net, model.state, features)
        unseen = model.unseen(scores.device)
        return probabilities_of(scores.masked_fill(unseen, -torch.inf), model.temperature).float()

    def features(self, feature_map: FeatureMap, inputs: Inputs) -> Tensor:
        """Features under a base, or by a function of the inputs. Nothing is loaded, which a graph could not show."""
        if isinstance(feature_map, BlockFeatures):
            return feature_map.compute(self.net, inputs)
        if callable(feature_map):
            return feature_map(self.net, inputs)
        tensors = feature_map.tensors if isinstance(feature_map, Block) else feature_map
        found: Tensor = functional_call(self.net.base, dict(tensors), inputs)
        return found


class GraphPrediction(Prediction):
    """The prediction of nodes of a graph."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        block = model.state.get("dictionary")
        if block is not None:  # rows without an entry are left out here, since ONNX has no sizes that depend on values
            words = block.tensors["words"]
            model.state = model.state.put(dictionary=replace(block, tensors={"words": words[words >= 0]}))

    def forward(self, features: Tensor, edges: Tensor, nodes: Tensor) -> Tensor:  # type: ignore[override]
        return self.predict(features, edges, nodes)


def export_onnx(model: Model, target: Path) -> None:
    """Writes a model as ONNX."""
    if model.modality not in INPUTS or len(model.like) != len(INPUTS[model.modality]):
        raise NotApplicable(
            f"a model of {KINDS.get(model.modality, model.modality)} cannot be exported to ONNX; use --safetensors"
        )
    onnx = import_onnx()
    inputs, free = example_inputs(model)
    prediction = GraphPrediction(model) if len(inputs) > 1 else Prediction(model)
    with quiet(), torch.no_grad():
        prediction(*inputs)  # computes constants, which the export could not
        proto = onnx_graph(model, prediction, inputs, free)
    if not has_free_sizes(proto):
        raise NotApplicable(
            f"the method '{model.header.get('method')}' with this encoder can be exported for {EXAMPLES} examples at a "
            "time only; use --safetensors"
        )
    onnx.helper.set_model_props(proto, metadata(model))
    write_bytes(target, proto.SerializeToString())


def onnx_graph(model: Model, prediction: nn.Module, inputs: Any, free: Any) -> Any:
    """The prediction of a model as an ONNX graph."""
    try:
        program = torch.onnx.export(
            prediction,
            inputs,
            dynamo=True,
            input_names=list(INPUTS[model.modality]),
            output_names=[OUTPUT],
            dynamic_shapes=free,
            verbose=False,
        )
    except Exception as error:  # the exporter has many kinds of its own
        raise NotApplicable(
            f"the method '{model.header.get('method')}' with this encoder has operations that ONNX lacks "
            f"({type(error).__name__}); use --safetensors"
        ) from error
    assert program is not None
    return program.model_proto


def has_free_sizes(proto: Any) -> bool:
    """Whether every input may have any number of examples. The exporter fixes it where code asks for its value."""
    return all(any(d.dim_param for d in given.type.tensor_type.shape.dim) for given in proto.graph.input)


def example_inputs(model: Model) -> tuple[Inputs, tuple[dict[int, Any], ...]]:
    """Inputs that the export follows through the model, and which sizes of each are free."""
    x, *graph = model.like
    examples = torch.export.Dim("examples", min=1)
    if not graph:
        return (torch.zeros(EXAMPLES, *x.shape[1:], dtype=x.dtype),), ({0: examples},)
    features = torch.zeros(EXAMPLES + 1, x.shape[1], dtype=x.dtype)
    around = torch.arange(EXAMPLES + 1)
    ends = torch.stack([around, around.roll(1)])
    edges = torch.cat([ends, ends.flip(0)], 1)  # a ring, in both directions
    nodes = torch.arange(EXAMPLES)
    sizes = {name: torch.export.Dim(name, min=2) for name in ("nodes", "edges")}
    return (features, edges, nodes), ({0: sizes["nodes"]}, {1: sizes["edges"]}, {0: examples})


def import_onnx() -> Any:
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError:
        raise ConfigError(
            "ONNX needs the packages onnx and onnxscript; install them with pip install 'profcil[export]'"
        ) from None
    return onnx


def metadata(model: Model) -> dict[str, str]:
    """What the ONNX file says about itself: texts, JSON where a value has parts."""
    form = model.input_format.to_json() if model.input_format else None
    facts = {name: str(model.header.get(name, "")) for name in ("profcil", "dataset", "method")}
    return {**facts, "names": json.dumps(model.names), "seen": json.dumps(model.seen), "input_format": json.dumps(form)}


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporter's messages about its own workings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
