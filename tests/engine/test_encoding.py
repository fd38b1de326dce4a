"""Encodings of tensors: bounded errors, exact sizes, and no further error when a decoded tensor is encoded again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.engine.channel import Block
from profcil.engine.encoding import decoded, encoded
from profcil.errors import Failure

ENCODINGS = ("float16", "bfloat16", "int8")
D = 16


def rows(seed: int, classes: int = 5, size: float = 1.0) -> torch.Tensor:
    """Rows of different sizes, the first one zero."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(classes, D, generator=rng) * size
    return values * torch.arange(classes)[:, None] ** 2


def there_and_back(tensor: torch.Tensor, encoding: str) -> torch.Tensor:
    return decoded(encoded({"mean": tensor}, encoding, len(tensor)))["mean"]


@given(st.integers(0, 999), st.sampled_from([1e-3, 1.0, 30.0]), st.sampled_from(ENCODINGS))
@settings(max_examples=60, deadline=None)
def test_the_error_is_bounded(seed, size, encoding):
    sent = rows(seed, size=size)
    error = (there_and_back(sent, encoding) - sent).abs()
    largest = sent.abs().amax(1, keepdim=True)
    smallest = 2.0**-24  # of float16
    bounds = {
        "float16": sent.abs() * 2.0**-11 + smallest / 2,
        "bfloat16": sent.abs() * 2.0**-8,
        "int8": largest / 127 * (1 + 2.0**-10) / 2 * (1 + 1e-6),
    }
    assert bool((error <= bounds[encoding]).all())


@given(st.integers(0, 999), st.sampled_from([1e-30, 1e-3, 1.0, 30.0]), st.sampled_from(ENCODINGS))
@settings(max_examples=60, deadline=None)
def test_what_was_decoded_is_encoded_without_a_further_error(seed, size, encoding):
    once = there_and_back(rows(seed, size=size), encoding)
    assert torch.equal(there_and_back(once, encoding), once)
    first = encoded({"mean": once}, encoding, len(once))
    again = encoded(decoded(first), encoding, len(once))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(("encoding", "size"), [("float16", 2 * D), ("bfloat16", 2 * D), ("int8", D + 4)])
def test_a_block_takes_the_bytes_of_its_encoding(encoding, size):
    tensors = {"mean": rows(0), "spread": rows(1), "count": torch.ones(5, dtype=torch.int32)}
    block = Block("memory", tensors, tuple(range(5)))
    sent = block.encoded({"memory": encoding})
    assert sent.bytes == 5 * (2 * size + 4)
    assert sent.header_bytes == block.header_bytes == 5 * 4
    assert sent.decoded().tensors.keys() == tensors.keys()
    assert torch.equal(sent.decoded().tensors["count"], tensors["count"])


def test_other_kinds_counts_and_single_numbers_stay():
    tensors = {"count": torch.arange(3), "noise": torch.tensor([0.1]), "wide": torch.ones(3, D, dtype=torch.float64)}
    block = Block("memory", tensors, (1, 2, 3))
    assert block.encoded({"model": "float16"}) is block
    assert all(block.encoded({"memory": "int8"}).tensors[name] is tensor for name, tensor in tensors.items())


def test_int8_is_for_rows_by_class_and_other_tensors_are_float16():
    tensors = {"mean": rows(0), "matrix": rows(1)[:4], "radius": rows(2)[:, :1], "confidence": rows(3)[0]}
    sent = encoded(tensors, "int8", 5)
    assert list(sent) == ["mean:int8", "mean:scale", "matrix:float16", "radius:float16", "confidence:float16"]


def test_a_value_beyond_float16_is_an_error_and_not_infinity():
    with pytest.raises(Failure, match="choose bfloat16"):
        there_and_back(torch.full((2, D), 1e6), "float16")
    assert bool(there_and_back(torch.full((2, D), 1e6), "bfloat16").isfinite().all())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_value_that_is_not_finite_does_not_become_finite(encoding):
    sent = rows(0)
    sent[2, 3] = torch.nan
    sent[4, 0] = torch.inf
    got = there_and_back(sent, encoding)
    assert not bool(got[2, 3].isfinite())
    assert not bool(got[4, 0].isfinite())
    assert bool(got[[0, 1, 3]].isfinite().all())


@pytest.mark.parametrize(
    "tensors",
    [
        {"mean:float16": torch.zeros(2, D)},
        {"mean:int8": torch.zeros(2, D, dtype=torch.int8)},
        {"mean:int8": torch.zeros(2, D, dtype=torch.int8), "mean:scale": torch.ones(3)},
        {"mean:int4": torch.zeros(2, D, dtype=torch.int8)},
    ],
)
def test_a_tensor_that_is_not_what_its_name_says_is_refused(tensors):
    with pytest.raises(ValueError, match="tensor mean"):
        decoded(tensors)
