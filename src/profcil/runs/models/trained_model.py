"""The global model of a finished run. It predicts the way the run's method does, and needs no data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil import registry
from profcil.config import ModelSettings
from profcil.errors import CodeNote, ConfigError, DataError, RunFolderError
from profcil.io.atomic_files import read_tensors
from profcil.plain_values import build
from profcil.resolve import resolve
from profcil.runs.models.saved_model import NAME, PLUGINS, SavedModel, empty_bundle, empty_inputs, read_model
from profcil.runs.reader import Run, load_run
from profcil.runs.state import unpack, unpack_server

if TYPE_CHECKING:  # the functions import torch when they are called
    from torch import Tensor

    from profcil.data.bundle import Bundle, Examples, Inputs
    from profcil.data.input_format import InputFormat
    from profcil.engine.channel import ServerState
    from profcil.methods.base import Method
    from profcil.model.net import Net

CALIBRATION = "calibration.json"  # a temperature that `profcil eval --calibrate` fitted, beside the model file
KINDS = {"image": "images", "text": "texts", "graph": "graphs", "table": "tables"}


class Model:
    """A trained model. Calling it with inputs returns class ids.

    Images are uint8 [n, channels, height, width]. Texts are token ids [n, length]. A graph is its node features, its
    edges [2, edges] and, optionally, the nodes to classify (all nodes by default). Inputs may be arrays or tensors.
    `read_texts` and `read_images` make such inputs of texts and of image files.
    """

    def __init__(
        self,
        net: Net,
        method: Method,
        state: ServerState,
        seen: tuple[int, ...],
        names: tuple[str, ...],
        like: Inputs,
        input_format: InputFormat | None = None,
        temperature: float | None = 1.0,
        header: Mapping[str, Any] | None = None,
    ) -> None:
        self.net = net
        self.method = method
        self.state = state
        self.seen = seen  # class ids that the stream has introduced; no other class is predicted
        self.names = names  # names of all classes, by class id
        self.like = like  # empty inputs with the expected shapes and types
        self.input_format = input_format  # how raw inputs become tensors; None = unknown
        self.temperature = temperature  # scores divided by it are log-probabilities; None = not known
        self.header = dict(header or {})  # what the model file says: dataset, method, version, metrics

    def __call__(self, *inputs: Any) -> Tensor:
        """Class ids, one for each example."""
        return self.scores(*inputs).argmax(1)

    def scores(self, *inputs: Any) -> Tensor:
        """The scores of the method, [examples, classes]; -inf for classes that the stream has not introduced."""
        import torch

        from profcil.engine.client import embed

        examples = self.examples(*inputs)
        index = torch.arange(len(examples), device=examples.y.device)
        with torch.no_grad():
            features = self.method.views(self.state, lambda lens: embed(self.net, lens, examples, index))
            self.net.load(self.state.weights())
            self.net.eval()
            scores = self.method.scores(self.net, self.state, features)
            return scores.masked_fill(self.unseen(scores.device), -torch.inf)

    def unseen(self, device: Any) -> Tensor:
        """The mask of the classes that the stream has not introduced."""
        import torch

        mask = torch.ones(self.net.classes, dtype=torch.bool)
        mask[list(self.seen)] = False
        return mask.to(device)

    def probabilities(self, *inputs: Any) -> Tensor:
        """The probability of every class, [examples, classes]: the softmax of the scores over the temperature."""
        return probabilities_of(self.scores(*inputs), self.temperature)

    # -- raw inputs ---------------------------------------------------------------------------------------------------

    @property
    def modality(self) -> str:
        return self.net.facts.modality

    def expect(self, modality: str) -> InputFormat:
        """The format of raw inputs, if the model takes inputs of this modality."""
        takes = KINDS.get(self.modality, self.modality)
        if modality != self.modality:
            raise DataError(
                f"this is a model of {takes}, which cannot read {KINDS.get(modality, modality)}; give {takes}"
            )
        if self.input_format is None:
            raise DataError(
                f"this model does not say how {takes} become tensors, because its dataset gave no InputFormat; "
                "use profcil.load_model with tensors"
            )
        return self.input_format

    def read_texts(self, texts: Sequence[str]) -> Tensor:
        """Texts as the token ids that the model takes."""
        return self.expect("text").encode_texts(list(texts))

    def read_images(self, paths: Sequence[str | Path | bytes]) -> Tensor:
        """Image files, or their contents, as the pixels that the model takes. Images of another size are resized."""
        import torch

        form = self.expect("image")
        images = [form.read_image(path if isinstance(path, bytes) else Path(path)) for path in paths]
        x = torch.stack(images) if images else torch.zeros(0, *form.shape, dtype=torch.uint8)
        return x.float() / 255 if self.like[0].is_floating_point() else x

    def predict_texts(self, texts: Sequence[str]) -> list[str]:
        """The class name of each text."""
        return self.names_of(self(self.read_texts(texts)))

    def predict_images(self, paths: Sequence[str | Path]) -> list[str]:
        """The class name of each image file."""
        return self.names_of(self(self.read_images(paths)))

    def names_of(self, ids: Tensor) -> list[str]:
        return [self.names[i] for i in ids.tolist()]

    # -- checks of inputs ---------------------------------------------------------------------------------------------

    def examples(self, *inputs: Any) -> Examples:
        """The inputs in the form that encoders take. Labels are zeros; prediction does not use them."""
        import torch

        from profcil.data.bundle import Nodes, Rows

        device = next(self.net.parameters()).device
        given = [torch.as_tensor(x).to(device) for x in inputs]
        given = [with_precision(x, like) for x, like in zip(given, self.like, strict=False)]
        is_graph = len(self.like) == 3
        if is_graph and len(given) == 2:
            given.append(torch.arange(len(given[0]), device=device))
        self.check_inputs(given, is_graph)
        y = torch.zeros(len(given[-1]), dtype=torch.long, device=device)
        if not is_graph:
            return Rows(given[0], y)
        x, edges, nodes = given
        return Nodes(x, edges, y, nodes)

    def check_inputs(self, given: list[Tensor], is_graph: bool) -> None:
        """Refuses inputs whose type or shape differs from those of the training data."""
        for i, like in enumerate(self.like):
            is_edges = is_graph and i == 1  # two rows and any number of columns
            x = given[i] if i < len(given) else None
            if x is None or not fits(x, like, is_edges):
                shape = [2, "n"] if is_edges else ["n", *like.shape[1:]]
                given_text = "missing" if x is None else f"{tuple(x.shape)} of {x.dtype}"
                text = f"input {i + 1} is {given_text}; this model takes {shape} of {like.dtype}"
                raise DataError(text.replace("'", ""))


def probabilities_of(scores: Tensor, temperature: float | None) -> Tensor:
    """The softmax of scores over a temperature, in float64. Without a temperature it is that of the scores."""
    scores = scores.double()
    below = scores - scores.amax(1, keepdim=True)  # first, since a class without statistics has the lowest number
    return (below / (temperature or 1.0)).softmax(1)


def with_precision(x: Tensor, like: Tensor) -> Tensor:
    """Numbers with a fraction in the precision of the model: arrays of numpy have float64."""
    both_fractions = x.is_floating_point() and like.is_floating_point()
    return x.to(like.dtype) if both_fractions else x


def fits(x: Tensor, like: Tensor, is_edges: bool) -> bool:
    """Whether an input has the type of `like`, and its shape except for the number of examples or edges."""
    if x.dtype != like.dtype or x.dim() != like.dim():
        return False
    if is_edges:
        return x.shape[:1] == like.shape[:1]
    return x.shape[1:] == like.shape[1:]


# -- loading ----------------------------------------------------------------------------------------------------------


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
