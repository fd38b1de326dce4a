"""Batched values of several clients, which a loss can use like one client's tensors.

A loss is written for one client. If it only passes its tensors to the model and to the functions in `BATCHED`, the same
lines give the losses of several clients in one computation. Any other operation, such as indexing, reducing or
branching, raises `Refused`; those clients are then computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from profcil.model import losses


class Refused(Exception):
    """A loss that cannot be computed for several clients at once."""


class Many:
    """A tensor with a leading client axis, or a list with one item a client. It can be passed on, scaled by a number,
    and added to another one; other operations raise `Refused`."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __add__(self, other: Any) -> Many:
        if isinstance(other, Many) and _shape(self) != _shape(other):
            raise Refused("sum of values with different shapes")
        return Many(self.of + _number(other))

    def __mul__(self, number: Any) -> Many:
        if isinstance(number, Many):
            raise Refused("product of values that differ between clients")
        return Many(self.of * _number(number))

    __radd__, __rmul__ = __add__, __mul__

    def __getattr__(self, name: str) -> Any:
        raise Refused(name)

    def __eq__(self, other: object) -> bool:
        raise Refused("comparison")

    def __bool__(self) -> bool:
        raise Refused("branch")

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in BATCHED:
            raise Refused(str(function))
        return Many(BATCHED[function](*map(_inner, args), **{k: _inner(v) for k, v in (kwargs or {}).items()}))


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
    return value.of if isinstance(value, Many) else value


def _number(value: Any) -> Any:
    if not isinstance(value, int | float | Many):
        raise Refused("one client's tensor combined with those of several clients")
    return _inner(value)


def _shape(value: Many) -> Any:
    return value.of.shape if isinstance(value.of, Tensor) else None
