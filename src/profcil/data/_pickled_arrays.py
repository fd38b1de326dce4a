"""Arrays and sparse matrices of official pickles, held as plain values until they are checked.

numpy's own `ndarray` and `dtype` trust what a pickle gives them: a forged data type turns raw bytes into objects. So
the unpickler fills these classes instead, and the bytes become an array here, by a fixed list of numeric types.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

NUMERIC = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
ORDERS = {"|": "|", "<": "<", ">": ">"}
MAX_DIMENSIONS = 4
MAX_ENTRIES = 2**30  # of a dense matrix; the largest official one has 125 million


class NumberType:
    """The numeric type that a pickle names. Structures, objects and texts are refused."""

    def __init__(self, code: Any, *_: Any) -> None:
        if type(code) is not str or code not in NUMERIC:
            raise ValueError(f"an array has a type other than {', '.join(NUMERIC)}")
        self.code = code
        self.order = "|"

    def build(self, state: Any) -> None:
        """Takes the byte order. Anything that would make the type a structure is refused."""
        is_state = type(state) is tuple and len(state) == 8
        if not is_state or state[1] not in ORDERS or any(state[2:5]):
            raise ValueError("an array has a type that is not a plain number")
        self.order = ORDERS[state[1]]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


class Array:
    """An array of a pickle: shape, numeric type and bytes."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.type = NumberType("u1")
        self.by_columns = False
        self.raw: str | bytes = b""

    def build(self, state: Any) -> None:
        """Takes version, shape, type, order and bytes, which must fit together."""
        if type(state) is not tuple or len(state) != 5:
            raise ValueError("an array lacks its shape, type or bytes")
        _, shape, number, by_columns, raw = state
        is_shape = type(shape) is tuple and len(shape) <= MAX_DIMENSIONS and all(map(is_size, shape))
        if not is_shape or type(number) is not NumberType or type(raw) not in (str, bytes):
            raise ValueError("an array has a shape, type or bytes of a wrong form")
        needed = math.prod(shape) * number.dtype.itemsize
        if needed != len(raw):
            raise ValueError(f"an array needs {needed} bytes and has {len(raw)}")
        self.shape = shape
        self.type = number
        self.by_columns = by_columns is True or by_columns == 1
        self.raw = raw

    def values(self) -> np.ndarray:
        """The numbers, as an array of its own memory."""
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
        flat = np.frombuffer(raw, dtype=self.type.dtype)
        order: Literal["F", "C"] = "F" if self.by_columns else "C"
        return flat.reshape(self.shape, order=order).copy(order="K")


class Sparse:
    """A CSR matrix of a pickle, so that untrusted index arrays never reach compiled code unchecked."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def build(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError("a sparse matrix lacks its arrays")
        self.state = state

    def dense(self) -> np.ndarray:
        """The matrix as float32 [rows, columns]."""
        state = self.state
        shape = state["_shape"] if "_shape" in state else state["shape"]
        if type(shape) is not tuple:
            raise ValueError("the sparse matrix has no shape")
        data = array(state["data"])
        indices = array(state["indices"])
        indptr = array(state["indptr"])
        return densify(data, indices, indptr, shape)


def array(value: Any) -> np.ndarray:
    """The numbers of an array in a pickle. Any other value raises a ValueError."""
    if type(value) is not Array:
        raise ValueError(f"there is a {type(value).__name__} where an array is needed")
    return value.values()


def integers(value: Any) -> np.ndarray:
    """An int64 array from a list of whole numbers, or from an array of them."""
    if type(value) is Array:
        numbers = value.values()
        if numbers.dtype.kind not in "iu":
            raise ValueError("there are fractions where whole numbers are needed")
        return numbers.astype(np.int64)
    if type(value) is not list or not all(map(fits_int64, value)):
        raise ValueError("there is no list of whole numbers where one is needed")
    return np.array(value, dtype=np.int64)


def fits_int64(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def is_size(value: Any) -> bool:
    """Whether a value can be the length of an array's dimension."""
    return type(value) is int and 0 <= value < 2**31


def densify(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A dense float32 matrix from CSR arrays. Arrays that contradict each other raise a ValueError."""
    sizes = [int(size) for size in shape]
    is_matrix = len(sizes) == 2 and all(map(is_size, sizes))
    if not is_matrix or math.prod(sizes) > MAX_ENTRIES:
        raise ValueError(f"the sparse matrix is not a matrix of up to {MAX_ENTRIES} entries")
    are_lists = data.ndim == indices.ndim == indptr.ndim == 1
    are_whole = indices.dtype.kind in "iu" and indptr.dtype.kind in "iu"
    if not are_lists or not are_whole:
        raise ValueError("the arrays of the sparse matrix are not lists of whole numbers")
    counts: np.ndarray = np.diff(indptr.astype(np.int64))
    are_counts = len(counts) == sizes[0] and not (counts < 0).any()
    same_length = counts.sum() == len(data) == len(indices)
    if not are_counts or not same_length:
        raise ValueError("the arrays of the sparse matrix do not fit together")
    if len(indices) and not 0 <= indices.min() <= indices.max() < sizes[1]:
        raise ValueError("the sparse matrix has columns outside its shape")
    dense = np.zeros(sizes, dtype=np.float32)
    rows = np.repeat(np.arange(sizes[0]), counts)
    dense[rows, indices] = data
    return dense
