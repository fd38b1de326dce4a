"""How the blocks of methods are sums over clients, for secure sums (`engine/summed_replies.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from profcil.engine.channel import Block
from profcil.engine.summed_replies import Addend
from profcil.memory import symmetric
from profcil.memory.transport import EPSILON
from profcil.model.net import MODEL

ADDED_AS_IS = ("count", "noise")  # one number for each class
BOUND = "bound"


class ModelMean:
    """Weights, of which the mean is wanted: each client adds its weights times its number of examples."""

    def parts(self, block: Block, samples: int, classes: Sequence[int]) -> dict[str, Tensor]:
        return {name: samples * tensor.double() for name, tensor in block.tensors.items()}

    def block(self, sums: Mapping[str, Tensor], like: Block, samples: float, classes: Sequence[int]) -> Block | None:
        if not samples:
            return None
        mean = {name: (sums[name] / samples).to(tensor.dtype) for name, tensor in like.tensors.items()}
        return replace(like, tensors=mean)


class PlainSum:
    """Sums over examples. A bound on what is summed is a setting, the same at all clients."""

    def parts(self, block: Block, samples: int, classes: Sequence[int]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in block.tensors.items() if name != BOUND}

    def block(self, sums: Mapping[str, Tensor], like: Block, samples: float, classes: Sequence[int]) -> Block | None:
        bound = {name: tensor for name, tensor in like.tensors.items() if name == BOUND}
        return replace(like, tensors={**sums, **bound})


class ClassRows:
    """Means over the examples of each class, with their counts: each client adds sums over its examples of all classes.
    Where there is a scatter around these means, it adds the second moments instead. The variances of noise on the sums
    of classes are added as they are."""

    def parts(self, block: Block, samples: int, classes: Sequence[int]) -> dict[str, Tensor]:
        rows = [classes.index(label) for label in block.labels]
        count = block.tensors["count"].double()
        sums = {name: count[:, None] * block.tensors[name].double() for name in row_names(block)}
        sums |= {name: block.tensors[name].double() for name in ADDED_AS_IS if name in block.tensors}
        found = {}
        for name, tensor in sums.items():
            found[name] = tensor.new_zeros(len(classes), *tensor.shape[1:])
            found[name][rows] = tensor
        if "scatter" in block.tensors:
            found["scatter"] = block.tensors["scatter"].double() + between(count, block.tensors["mean"])
        return found

    def block(self, sums: Mapping[str, Tensor], like: Block, samples: float, classes: Sequence[int]) -> Block | None:
        rows = sums["count"].nonzero().flatten()
        if not len(rows):
            return None
        count = sums["count"][rows]
        tensors = {name: (sums[name][rows] / count[:, None]).float() for name in row_names(like)}
        tensors |= {n: sums[n][rows].to(like.tensors[n].dtype) for n in ADDED_AS_IS if n in sums}
        if "scatter" in sums:
            tensors["scatter"] = (sums["scatter"] - between(count, tensors["mean"])).float()
        labels = tuple(classes[row] for row in rows.tolist())
        return replace(like, tensors=tensors, labels=labels)


class WeightedShifts:
    """Shifts of class means with their confidences, for the same classes at all clients: each client adds its
    confidences, and its shifts times these."""

    def parts(self, block: Block, samples: int, classes: Sequence[int]) -> dict[str, Tensor]:
        confidence = block.tensors["confidence"].double()
        return {"confidence": confidence, "shift": confidence[:, None] * block.tensors["shift"].double()}

    def block(self, sums: Mapping[str, Tensor], like: Block, samples: float, classes: Sequence[int]) -> Block | None:
        confidence = sums["confidence"]
        shift = sums["shift"] / (confidence[:, None] + EPSILON)
        return replace(like, tensors={"shift": shift.float(), "confidence": confidence.float()})


MODEL_MEANS: dict[str, Addend] = dict.fromkeys(MODEL, ModelMean())


def row_names(block: Block) -> list[str]:
    """The tensors with a mean for each class."""
    return [name for name in block.tensors if name not in (*ADDED_AS_IS, "scatter")]


def between(count: Tensor, mean: Tensor) -> Tensor:
    """Σ n_y μ_y μ_yᵀ, packed."""
    wide = mean.double()
    return symmetric.packed_rows(wide.T @ (count[:, None] * wide))
