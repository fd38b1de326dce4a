"""Blocks as sums: adding the parts of clients gives what the server computes from their blocks."""

from __future__ import annotations

from dataclasses import replace

import torch

from profcil.engine.channel import Block, Reply
from profcil.memory import bank, covariance, linear
from profcil.memory.transport import combine
from profcil.methods.base import average
from profcil.methods.parts.addends import ClassRows, ModelMean, PlainSum, WeightedShifts
from profcil.methods.parts.memory_blocks import block_of_moments, moments_of
from profcil.methods.parts.summaries import report, summary_of_report

CLASSES = (1, 3, 4, 8)
LABELS = ((1, 4), (3, 4), (4,))  # of three clients; none has class 8
RNG = torch.Generator().manual_seed(0)


def examples(labels: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tensor(labels).repeat(7)
    return torch.randn(len(y), 5, generator=RNG) + y[:, None], y


def added(addend, blocks: list[Block], samples: list[int]) -> Block | None:
    parts = [addend.parts(block, n, CLASSES) for block, n in zip(blocks, samples, strict=True)]
    total = {name: sum(part[name].double() for part in parts) for name in parts[0]}
    return addend.block(total, blocks[0], float(sum(samples)), CLASSES)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def test_models_are_averaged_by_examples():
    blocks = [Block("model", {"w": torch.randn(3, 2, generator=RNG)}) for _ in range(3)]
    found = added(ModelMean(), blocks, [5, 1, 30])
    expected = average([Reply(c, n, {"head": b}) for c, (n, b) in enumerate(zip((5, 1, 30), blocks, strict=True))])
    assert close(found.tensors["w"], expected["head"]["w"])
    assert found.tensors["w"].dtype == torch.float32
    assert added(ModelMean(), blocks, [0, 0, 0]) is None


def test_moments_and_scatter_are_pooled():
    blocks = []
    for labels in LABELS:
        features, y = examples(labels)
        moments = bank.measure(features, y)
        rank = torch.searchsorted(torch.tensor(labels), y)
        scatter = covariance.packed_scatter(features, rank, moments.mean)
        blocks.append(
            replace(block_of_moments(moments), tensors={**block_of_moments(moments).tensors, "scatter": scatter})
        )
    found = added(ClassRows(), blocks, [14, 14, 7])
    parts = [moments_of(block) for block in blocks]
    pooled = bank.pool(parts)
    assert found.labels == pooled.labels == (1, 3, 4)
    assert all(close(found.tensors[name], getattr(pooled, name)) for name in ("mean", "second", "count"))
    assert found.tensors["count"].dtype == torch.int32
    expected = covariance.pool(parts, [block.tensors["scatter"] for block in blocks], pooled)
    one = covariance.pool([moments_of(found)], [found.tensors["scatter"]], pooled)
    assert close(one.matrix, expected.matrix) and one.count == expected.count


def test_rows_without_examples_are_none():
    rows = {"mean": torch.zeros(0, 5), "count": torch.zeros(0, dtype=torch.int32)}
    assert added(ClassRows(), [Block("statistics", rows)] * 3, [0, 0, 0]) is None


def test_reports_of_prolin_are_pooled():
    made = [examples(labels) for labels in LABELS]
    reports = [report(features, y, as_sums=True) for features, y in made]
    rows = added(ClassRows(), [r["class_means"] for r in reports], [1, 1, 1])
    second = added(PlainSum(), [r["second_moments"] for r in reports], [1, 1, 1])
    found = summary_of_report({"class_means": rows, "second_moments": second})
    expected = linear.pool([summary_of_report(report(features, y)) for features, y in made])
    assert found.labels == expected.labels
    assert close(found.mean, expected.mean) and close(found.count, expected.count) and close(found.gram, expected.gram)


def test_noise_is_added_and_a_bound_is_kept():
    rows = {"mean": torch.ones(1, 2), "count": torch.tensor([4], dtype=torch.int32), "noise": torch.tensor([0.5])}
    found = added(ClassRows(), [Block("statistics", rows, (label,)) for label in (4, 4, 1)], [1, 1, 1])
    assert found.labels == (1, 4)
    assert found.tensors["noise"].tolist() == [0.5, 1.0] and found.tensors["count"].tolist() == [4, 8]
    second = {"gram": torch.ones(3), "bound": torch.tensor([10.0])}
    total = added(PlainSum(), [Block("statistics", second)] * 3, [1, 1, 1])
    assert total.tensors["gram"].tolist() == [3.0] * 3 and float(total.tensors["bound"]) == 10.0


def test_shifts_are_combined_by_confidence():
    shifts = [torch.randn(2, 5, generator=RNG) for _ in range(3)]
    confidences = [torch.rand(2, generator=RNG) for _ in range(3)]
    blocks = [
        Block("transport", {"shift": s, "confidence": q}, (3, 9)) for s, q in zip(shifts, confidences, strict=True)
    ]
    found = added(WeightedShifts(), blocks, [1, 1, 1])
    assert found.labels == (3, 9)
    assert close(combine([found.tensors["shift"]], [found.tensors["confidence"]]), combine(shifts, confidences))
