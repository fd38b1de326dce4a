"""Summaries of features (`memory/linear.py`) as blocks: what clients report, and what the server stores."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.memory import linear, symmetric
from profcil.memory.linear import Summary
from profcil.memory.sketch import Sketch, sketch_of


def report(
    features: Tensor, y: Tensor, bound: float = math.inf, as_sums: bool = False, rank: int | None = None
) -> dict[str, Block]:
    """A client's report of some examples: means and counts per class, and second moments. `rank` are the directions of
    a sketch of these; with 0 there are none, with None the whole matrix."""
    labels, count, mean = linear.class_means(features, y)
    tensors = {"mean": mean.float(), "count": count.to(torch.int32)}
    limited = math.isfinite(bound)
    found = {"class_means": Block("statistics", tensors, labels, row_bound=bound if limited else 0.0)}
    second = second_moments(features, limited or as_sums, rank)
    if limited:
        second["bound"] = mean.new_tensor([bound]).float()
    if second:
        found["second_moments"] = Block("statistics", second, row_bound=math.hypot(bound, 1.0) if limited else 0.0)
    return found


def second_moments(features: Tensor, as_sums: bool, rank: int | None) -> dict[str, Tensor]:
    """The second moments of a report, by default a factor of their matrix. The matrix itself is sent if reports are
    added before the server sees them, or if features have a bound on their length: noise on a factor would not be noise
    on a sum."""
    if rank is None:
        rows = linear.append_one(features)
        return {"gram": symmetric.packed_gram(rows)} if as_sums else {"factor": symmetric.packed_factor(rows)}
    return tensors_of_sketch(sketch_of(features, rank)) if rank else {}


def empty_summary(features: Tensor, labels: Tensor, rank: int | None) -> Summary:
    """The summary of no examples, for features and labels without rows."""
    if rank is None:
        return linear.summarise(features, labels)
    _, count, mean = linear.class_means(features, labels)
    nothing = mean.new_zeros(0, 0)
    return Summary((), count.double(), mean, nothing, sketch=sketch_of(features, rank) if rank else None)


def has_report(blocks: Mapping[str, Block]) -> bool:
    """Whether a reply has a report."""
    return "class_means" in blocks and bool(blocks["class_means"].labels)


def summary_of_report(blocks: Mapping[str, Block], prefix: str = "") -> Summary:
    """The summary in a report."""
    means = blocks[f"{prefix}class_means"]
    mean = means.tensors["mean"].double()
    count = means.tensors["count"].double()
    second = second_of(blocks, f"{prefix}second_moments")
    gram = gram_of(second, mean)
    return Summary(
        means.labels, count, mean, gram, *bound_and_noise(means.tensors, second), sketch=stored_sketch(second)
    )


def second_of(blocks: Mapping[str, Block], name: str) -> Mapping[str, Tensor]:
    """The second moments of a report; empty if it has none."""
    return blocks[name].tensors if name in blocks else {}


def gram_of(second: Mapping[str, Tensor], mean: Tensor) -> Tensor:
    """The second-moment matrix of a report or of a stored summary; without rows if it has none."""
    if "gram" in second or "factor" in second:
        return symmetric.sent_gram(second, mean.shape[1] + 1)
    return mean.new_zeros(0, 0)


def stored_sketch(second: Mapping[str, Tensor]) -> Sketch | None:
    """The sketch of a report or of a stored summary; None if it has none."""
    if "product" not in second:
        return None
    return Sketch(second["product"].double(), second["diagonal"].double())


def tensors_of_sketch(sketch: Sketch) -> dict[str, Tensor]:
    """A sketch as it is sent and stored."""
    return {"product": sketch.product.float(), "diagonal": sketch.diagonal.float()}


def bound_and_noise(rows: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> tuple[float, float, Tensor | None]:
    """The bound on the length of features, and the variance of the noise on second moments and on the sums of each
    class."""
    if "bound" not in second:
        return math.inf, 0.0, None
    noise = float(second["noise"]) if "noise" in second else 0.0
    of_sums = rows["noise"] if "noise" in rows else torch.zeros_like(rows["count"])
    return float(second["bound"]), noise, of_sums.double()


def put_summary(state: ServerState, name: str, s: Summary) -> ServerState:
    """Stores a summary: class rows and matrix are separate blocks, so that the rows can be sent alone."""
    tensors = {"mean": s.mean.float(), "count": s.count.to(torch.int32)}
    if s.dispersion is not None:
        tensors["dispersion"] = s.dispersion.float()
    second = tensors_of_sketch(s.sketch) if s.sketch else {}
    if len(s.gram):
        second["gram"] = symmetric.pack(s.gram)
    if s.sum_noise is not None:
        tensors["noise"] = s.sum_noise.float()
        second |= {"noise": s.gram.new_tensor([s.noise]).float(), "bound": s.gram.new_tensor([s.bound]).float()}
    rows = Block("memory", tensors, s.labels)
    return state.put(**{name: rows, f"{name}_gram": Block("memory", second)})


def stored_summary(state: ServerState, name: str) -> Summary | None:
    """A stored summary; None if there is none."""
    rows = state.get(name)
    if rows is None:
        return None
    count = rows.tensors["count"].double()
    mean = rows.tensors["mean"].double()
    second = state.blocks[f"{name}_gram"].tensors
    known = rows.tensors.get("dispersion")
    dispersion = None if known is None else known.double()
    limits = bound_and_noise(rows.tensors, second)
    return Summary(rows.labels, count, mean, gram_of(second, mean), *limits, dispersion, stored_sketch(second))
