"""Summaries of features (`memory/linear.py`) as blocks: what clients report, and what the server stores."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from profcil.engine.channel import Block, ServerState
from profcil.memory import linear
from profcil.memory.linear import Summary


def report(features: Tensor, y: Tensor, bound: float = math.inf, as_sums: bool = False) -> dict[str, Block]:
    """A client's report of some examples: means and counts per class, and a factor of the second-moment matrix. The
    matrix itself is sent if reports are added before the server sees them, or if features have a bound on their length:
    noise on a factor would not be noise on a sum."""
    labels, count, mean = linear.class_means(features, y)
    tensors = {"mean": mean.float(), "count": count.to(torch.int32)}
    rows = linear.append_one(features)
    if math.isfinite(bound):
        means = Block("statistics", tensors, labels, row_bound=bound)
        sums = {"gram": linear.packed_gram(rows), "bound": mean.new_tensor([bound]).float()}
        second = Block("statistics", sums, row_bound=math.hypot(bound, 1.0))
    else:
        means = Block("statistics", tensors, labels)
        matrix = {"gram": linear.packed_gram(rows)} if as_sums else {"factor": linear.packed_factor(rows)}
        second = Block("statistics", matrix)
    return {"class_means": means, "second_moments": second}


def has_report(blocks: Mapping[str, Block]) -> bool:
    """Whether a reply has a report."""
    return "class_means" in blocks and bool(blocks["class_means"].labels)


def summary_of_report(blocks: Mapping[str, Block], prefix: str = "") -> Summary:
    """The summary in a report."""
    means = blocks[f"{prefix}class_means"]
    mean = means.tensors["mean"].double()
    count = means.tensors["count"].double()
    second = blocks[f"{prefix}second_moments"].tensors
    gram = linear.sent_gram(second, mean.shape[1] + 1)
    return Summary(means.labels, count, mean, gram, *bound_and_noise(means.tensors, second))


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
    second = {"gram": linear.pack(s.gram)}
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
    return Summary(rows.labels, count, mean, linear.unpack(second["gram"]), *limits, dispersion)
