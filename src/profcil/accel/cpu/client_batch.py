"""Batched values of several clients, which a loss can use like one client's tensors.

A loss is written for one client. If it only passes its tensors to the model and to the functions in `BATCHED`, the same
lines give the losses of several clients in one computation. Any other operation, such as indexing, reducing or
branching, raises `NotBatchable`; those clients are then computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from profcil.model import losses


class NotBatchable(Exception):
    """A loss that cannot be computed for several clients at once."""


class ClientBatch:
    """A tensor with a leading client axis, or a list with one item a client. It can be passed on, scaled by a number,
    and added to another one; other operations raise `NotBatchable`."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __add__(self, other: Any) -> ClientBatch:
        if isinstance(other, ClientBatch) and _shape(self) != _shape(other):
            raise NotBatchable("sum of values with different shapes")
        return ClientBatch(self.of + _number(other))

    def __mul__(self, number: Any) -> ClientBatch:
        if isinstance(number, ClientBatch):
            raise NotBatchable("product of values that differ between clients")
        return ClientBatch(self.of * _number(number))

    __radd__, __rmul__ = __add__, __mul__

    def __getattr__(self, name: str) -> Any:
        raise NotBatchable(name)

    def __eq__(self, other: object) -> bool:
        raise NotBatchable("comparison")

    def __bool__(self) -> bool:
        raise NotBatchable("branch")

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in BATCHED:
            raise NotBatchable(str(function))
        inner_args = [_inner(value) for value in args]
        inner_kwargs = {name: _inner(value) for name, value in (kwargs or {}).items()}
        result = BATCHED[function](*inner_args, **inner_kwargs)
        return ClientBatch(result)


def contrast(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """`losses.contrast` with a leading client axis: one value a client."""
    similarity = a @ b.mT / temperature
    both = similarity.log_softmax(1) + similarity.log_softmax(2)
    return -0.5 * both.diagonal(dim1=1, dim2=2).mean(1)


# Losses with a batched version. `cross_entropy` supports leading axes itself.
BATCHED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    losses.contrast: contrast,
    losses.cross_entropy: losses.cross_entropy,
}


def _inner(value: Any) -> Any:
    return value.of if isinstance(value, ClientBatch) else value


def _number(value: Any) -> Any:
    if not isinstance(value, int | float | ClientBatch):
        raise NotBatchable("one client's tensor combined with those of several clients")
    return _inner(value)


def _shape(value: ClientBatch) -> Any:
    return value.of.shape if isinstance(value.of, Tensor) else None
