"""Values of several clients at once, in the place of one client's tensors.

A loss is written for one client. Where all it does with its tensors is to hand them to the model and to functions that
know of a leading client axis (`carried`), the same lines give the losses of many clients in one computation. Anything
else, such as indexing, reducing or branching, would mix clients up, and is refused; those clients are then computed
one by one. So no loss has to say which kind it is, and none can be taken for the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


class Refused(Exception):
    """A loss that cannot be computed for several clients at once."""


class Many:
    """A tensor with a leading client axis, or a list with an item a client. It can be handed on, scaled by a number and
    added to its like, and nothing more can be found out about it."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __add__(self, other: Any) -> Many:
        if isinstance(other, Many) and _shape(self) != _shape(other):
            raise Refused("sum of values that are not alike")
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
        raise Refused(str(function))


def carried(function: Function) -> Function:
    """Marks a function of tensors that may all carry a leading client axis: it takes and gives `Many`, too."""

    @wraps(function)
    def either(*args: Any, **more: Any) -> Any:
        if not any(isinstance(a, Many) for a in (*args, *more.values())):
            return function(*args, **more)
        return Many(function(*map(_inner, args), **{k: _inner(a) for k, a in more.items()}))

    return either  # type: ignore[return-value]


def _inner(value: Any) -> Any:
    return value.of if isinstance(value, Many) else value


def _number(value: Any) -> Any:
    if not isinstance(value, int | float | Many):
        raise Refused("one client's tensor among those of many")
    return _inner(value)


def _shape(value: Many) -> Any:
    return value.of.shape if isinstance(value.of, Tensor) else None
