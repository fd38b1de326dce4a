"""Summaries of features (`memory/linear.py`) as blocks: what clients report, and what the server stores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from profcil.engine.payload import Block, ServerState
from profcil.memory import linear
from profcil.memory.linear import Summary


def report(features: Tensor, y: Tensor) -> dict[str, Block]:
    """A client's report of some examples: means and counts per class, and a factor of the second-moment matrix."""
    labels, count, mean = linear.class_means(features, y)
    rows = {"mean": mean.float(), "count": count.to(torch.int32)}
    factor = linear.packed_factor(linear.append_one(features))
    means = Block("statistics", rows, labels)
    second = Block("statistics", {"factor": factor})
    return {"class_means": means, "second_moments": second}


def has_report(blocks: Mapping[str, Block]) -> bool:
    """Whether a reply has a report."""
    return "class_means" in blocks and bool(blocks["class_means"].labels)


def summary_of_report(blocks: Mapping[str, Block], prefix: str = "") -> Summary:
    """The summary in a report."""
    means = blocks[f"{prefix}class_means"]
    mean = means.tensors["mean"].double()
    count = means.tensors["count"].double()
    factor = blocks[f"{prefix}second_moments"].tensors["factor"]
    gram = linear.gram_of_factor(factor, mean.shape[1] + 1)
    return Summary(means.labels, count, mean, gram)


def put_summary(state: ServerState, name: str, s: Summary) -> ServerState:
    """Stores a summary: class rows and matrix are separate blocks, so that the rows can be sent alone."""
    tensors = {"mean": s.mean.float(), "count": s.count.to(torch.int32)}
    rows = Block("memory", tensors, s.labels)
    gram = Block("memory", {"gram": linear.pack(s.gram)})
    return state.put(**{name: rows, f"{name}_gram": gram})


def stored_summary(state: ServerState, name: str) -> Summary | None:
    """A stored summary; None if there is none."""
    rows = state.get(name)
    if rows is None:
        return None
    count = rows.tensors["count"].double()
    mean = rows.tensors["mean"].double()
    triangle = state.blocks[f"{name}_gram"].tensors["gram"]
    return Summary(rows.labels, count, mean, linear.unpack(triangle))
