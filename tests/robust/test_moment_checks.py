"""Second moments that no examples have are refused; those of any examples are not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.engine.channel import Block, Reply
from profcil.engine.moment_checks import unfit_factor, unfit_sketch, wrong_matrices, wrong_moments
from profcil.memory import symmetric
from profcil.memory.bank import measure
from profcil.methods.parts.memory_blocks import block_of_moments
from profcil.methods.parts.summaries import report

WIDTH = 6


def examples(n: int, seed: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=rng)
    features = size * (torch.randn(n, WIDTH, generator=rng) + 3 * y[:, None])
    features[:, 0] = 0  # a feature that never varies
    return features, y


def sent(n: int = 20, seed: int = 0, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means, counts and factor of a client's report."""
    blocks = report(*examples(n, seed, size))
    rows = blocks["class_means"].tensors
    return rows["mean"].double(), rows["count"].double(), blocks["second_moments"].tensors["factor"]


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 40), seed=st.integers(0, 500), size=st.sampled_from([1e-4, 1.0, 1e4]))
def test_honest_reports_are_accepted(n, seed, size):
    assert list(unfit_factor(*sent(n, seed, size))) == []
    assert list(wrong_moments(block_of_moments(measure(*examples(n, seed, size))))) == []


def sketched(n: int = 20, seed: int = 0, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Means, counts and sketch of a client's report."""
    blocks = report(*examples(n, seed, size), rank=3)
    tensors = blocks["class_means"].tensors | blocks["second_moments"].tensors
    return tuple(tensors[name].double() for name in ("mean", "count", "product", "diagonal"))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 40), seed=st.integers(0, 500), size=st.sampled_from([1e-4, 1.0, 1e4]))
def test_honest_sketches_are_accepted(n, seed, size):
    assert list(unfit_sketch(*sketched(n, seed, size))) == []
    assert list(wrong_matrices(Reply(0, n, report(*examples(n, seed, size), rank=3)), 1e-5)) == []


def test_a_sketch_that_no_examples_have_is_refused():
    mean, count, product, diagonal = sketched()
    assert "no sketch of 6 features" in next(unfit_sketch(mean, count, product[:-1], diagonal))
    assert "below the squares" in next(unfit_sketch(mean, count, product, diagonal / 10))
    assert "no symmetric matrix" in next(unfit_sketch(mean, count, product.roll(1, 1), diagonal))
    assert "less than the second moments" in next(unfit_sketch(mean, count, -product, diagonal))
    lie = Reply(0, 20, report(*examples(20, 0), rank=3))
    moved = {"product": -product.float(), "diagonal": diagonal.float()}
    lie.blocks["second_moments"] = Block("statistics", moved)
    assert any("less than the second moments" in reason for reason in wrong_matrices(lie, 1e-5))


def test_a_factor_of_other_means_is_refused():
    mean, count, factor = sent()
    assert "other sums" in next(unfit_factor(-mean, count, factor))


def test_a_factor_of_fewer_examples_is_refused():
    mean, count, factor = sent()
    assert "another number of examples" in next(unfit_factor(mean, count * 10, factor))


def test_a_factor_of_another_width_is_refused():
    mean, count, factor = sent()
    assert "no triangle" in next(unfit_factor(mean, count, factor[:-2]))


def test_means_that_leave_no_scatter_are_refused():
    """The sums agree, and the means of two classes are further apart than any examples with this matrix have them."""
    mean, count, factor = sent()
    apart = torch.zeros_like(mean)
    apart[0, 1] = 100 / count[0]
    apart[1, 1] = -100 / count[1]
    assert any("less than the second moments" in reason for reason in unfit_factor(mean + apart, count, factor))


def test_a_scatter_that_is_negative_somewhere_is_refused():
    matrix = torch.eye(WIDTH)
    block = block_of_moments(measure(*examples(9, 0)))
    good = {**block.tensors, "scatter": symmetric.pack(matrix)}
    bad = {**block.tensors, "scatter": symmetric.pack(matrix - 2 * torch.eye(WIDTH)[:, :1] @ torch.eye(WIDTH)[:1])}
    assert list(wrong_moments(type(block)("statistics", good, block.labels))) == []
    assert "semidefinite" in next(wrong_moments(type(block)("statistics", bad, block.labels)))


@pytest.mark.parametrize("radius", [False, True])
def test_a_second_moment_below_the_square_of_the_mean_is_refused(radius):
    block = block_of_moments(measure(*examples(9, 0), radius=radius))
    half = {**block.tensors, "second": block.tensors["second"] * 0.01}
    assert "below the square" in next(wrong_moments(type(block)("statistics", half, block.labels)))
