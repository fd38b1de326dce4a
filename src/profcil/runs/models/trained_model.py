"""The global model of a finished run. It predicts the way the run's method does, and needs no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.errors import DataError

if TYPE_CHECKING:  # the functions import torch when they are called
    from torch import Tensor

    from profcil.data.bundle import Examples, Inputs
    from profcil.data.input_format import InputFormat
    from profcil.engine.channel import ServerState
    from profcil.methods.base import Method
    from profcil.model.net import Net

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
            features = self.method.views(self.state, lambda feature_map: embed(self.net, feature_map, examples, index))
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
