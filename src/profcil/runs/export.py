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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from profcil.engine.client import BlockFeatures, Lens
from profcil.engine.payload import Block
from profcil.errors import ConfigError, NotApplicable, RunFolderError
from profcil.io.atomic_files import write_bytes
from profcil.runs.saved_model import read_model
from profcil.runs.trained_model import KINDS, Model, model_file, probabilities_of

EXAMPLES = 3  # in the batch that the export follows through the model
INPUT = {"image": "images", "text": "tokens", "table": "rows"}
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
        model = self.model
        features = model.method.views(model.state, lambda lens: self.features(lens, x))
        scores = model.method.scores(self.net, model.state, features)
        unseen = model.unseen(scores.device)
        return probabilities_of(scores.masked_fill(unseen, -torch.inf), model.temperature).float()

    def features(self, lens: Lens, x: Tensor) -> Tensor:
        """Features under a base, or by a function of the inputs. Nothing is loaded, which a graph could not show."""
        if isinstance(lens, BlockFeatures):
            return lens.compute(self.net, (x,))
        if callable(lens):
            return lens(self.net, (x,))
        tensors = lens.tensors if isinstance(lens, Block) else lens
        found: Tensor = functional_call(self.net.base, dict(tensors), (x,))
        return found


def export_onnx(model: Model, target: Path) -> None:
    """Writes a model as ONNX."""
    if model.modality not in INPUT or len(model.like) != 1:
        raise NotApplicable(
            f"a model of {KINDS.get(model.modality, model.modality)} cannot be exported to ONNX; use --safetensors"
        )
    onnx = import_onnx()
    like = model.like[0]
    x = torch.zeros(EXAMPLES, *like.shape[1:], dtype=like.dtype)
    name = INPUT[model.modality]
    batch = torch.export.Dim("examples", min=1)
    prediction = Prediction(model)
    with quiet(), torch.no_grad():
        prediction(x)  # computes constants, which the export could not
        try:
            program = torch.onnx.export(
                prediction,
                (x,),
                dynamo=True,
                input_names=[name],
                output_names=[OUTPUT],
                dynamic_shapes=({0: batch},),
                verbose=False,
            )
        except Exception as error:  # the exporter has many kinds of its own
            raise NotApplicable(
                f"the method '{model.header.get('method')}' with this encoder has operations that ONNX lacks "
                f"({type(error).__name__}); use --safetensors"
            ) from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata(model))
    write_bytes(target, proto.SerializeToString())


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
