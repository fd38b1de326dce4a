"""The global model of a finished run. It predicts the way the run's method does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil import registry
from profcil.errors import DataError, RunFolderError
from profcil.io.atomic_files import read_tensors
from profcil.resolve import resolve
from profcil.runs.reader import load_run
from profcil.runs.state import unpack

if TYPE_CHECKING:  # the functions import torch when they are called
    from torch import Tensor

    from profcil.data.bundle import Bundle, Examples, Inputs
    from profcil.engine.payload import ServerState
    from profcil.methods.base import Method
    from profcil.model.net import Net


class Model:
    """A trained model. Calling it with inputs returns class ids.

    Images are uint8 [n, channels, height, width]. Texts are token ids [n, length]. A graph is its node features, its
    edges [2, edges] and, optionally, the nodes to classify (all nodes by default). Inputs may be arrays or tensors.
    """

    def __init__(
        self, net: Net, method: Method, state: ServerState, seen: tuple[int, ...], names: tuple[str, ...], like: Inputs
    ) -> None:
        self.net = net
        self.method = method
        self.state = state
        self.seen = seen  # class ids that the stream has introduced; no other class is predicted
        self.names = names  # names of all classes, by class id
        self.like = like  # empty inputs with the expected shapes and types

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
            unseen = torch.ones(self.net.classes, dtype=torch.bool, device=scores.device)
            unseen[list(self.seen)] = False
            return scores.masked_fill(unseen, -torch.inf)

    def examples(self, *inputs: Any) -> Examples:
        """The inputs in the form that encoders take. Labels are zeros; prediction does not use them."""
        import torch

        from profcil.data.bundle import Nodes, Rows

        device = next(self.net.parameters()).device
        given = [torch.as_tensor(x).to(device) for x in inputs]
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


def fits(x: Tensor, like: Tensor, is_edges: bool) -> bool:
    """Whether an input has the type of `like`, and its shape except for the number of examples or edges."""
    if x.dtype != like.dtype or x.dim() != like.dim():
        return False
    if is_edges:
        return x.shape[:1] == like.shape[:1]
    return x.shape[1:] == like.shape[1:]


def load_model(path: str | Path, *, data: str | Path | None = None, device: str = "cpu") -> Model:
    """The model that a finished run ended with.

    The run's dataset is needed: it gives the shape of the encoder and the scale of the inputs. `data` is the folder
    to load it from; by default that is the folder the run used.
    """
    from profcil.engine.world import make_world

    run = load_run(path)
    if not run.done:
        raise RunFolderError(f"{path} is not finished; continue it with `profcil resume {path}`")
    config = replace(resolve(str(run.path / "config.toml")), device=device)
    data_dir = Path(data or run.facts["data_dir"])
    world = make_world(config, data_dir)
    if world.bundle.fingerprint != run.facts["data"]:
        raise RunFolderError(
            f"the data under {data_dir} is not the data that {path} was trained on; give the folder of that data"
        )
    stored = read_tensors(run.path / "state.safetensors")
    if stored is None:
        raise RunFolderError(f"run folder {path} has no readable state; run it again")
    state = unpack(*stored, world.device, run.path / "clients").server
    method = registry.find("methods", config.method).METHOD(config.params)
    seen = tuple(sorted(world.plan.seen(world.plan.positions - 1)))
    return Model(world.net, method, state, seen, world.bundle.names, empty_inputs(world.bundle))


def empty_inputs(bundle: Bundle) -> Inputs:
    """Inputs without examples, in the shapes and types of a dataset."""
    x, *graph = bundle.train.inputs(bundle.train.y[:0])
    if not graph:
        return (x,)
    edges, nodes = graph
    return x[:0].clone(), edges[:, :0].clone(), nodes
