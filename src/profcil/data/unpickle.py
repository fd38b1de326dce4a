"""A restricted unpickler for official data files.

A pickle can name any function and call it. Here only the names that arrays, dictionaries and sparse matrices need are
allowed; any other name is refused before it is imported. Python 2 strings are read as latin1, which preserves array
bytes.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy._core.multiarray import _reconstruct

from profcil.errors import DataError


class Sparse:
    """A replacement for scipy's CSR matrix, so that untrusted index arrays never reach compiled code unchecked."""

    def dense(self) -> np.ndarray:
        """The matrix as float32 [rows, columns]."""
        state = self.__dict__
        shape = state["_shape"] if "_shape" in state else state["shape"]
        return densify(state["data"], state["indices"], state["indptr"], tuple(shape))


def densify(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """A dense float32 matrix from CSR arrays. Arrays that contradict each other raise a ValueError."""
    counts = np.diff(indptr)
    are_counts = len(counts) == shape[0] and not (counts < 0).any()
    if not are_counts or counts.sum() != len(data) or len(data) != len(indices):
        raise ValueError("the arrays of the sparse matrix do not fit together")
    if len(indices) and not 0 <= indices.min() <= indices.max() < shape[1]:
        raise ValueError("the sparse matrix has columns outside its shape")
    dense = np.zeros(shape, dtype=np.float32)
    rows = np.repeat(np.arange(shape[0]), counts)
    dense[rows, indices] = data
    return dense


def latin1(text: str, encoding: str) -> bytes:
    """A replacement for `_codecs.encode`, which protocol 2 calls to restore bytes. Only latin1 is allowed."""
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding} is not allowed")
    return text.encode("latin1")


ARRAYS: Mapping[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": latin1,
}
GRAPHS: Mapping[str, Callable[..., Any]] = {
    **ARRAYS,
    "scipy.sparse.csr.csr_matrix": Sparse,
    "scipy.sparse._csr.csr_matrix": Sparse,
    "collections.defaultdict": defaultdict,
    "__builtin__.list": list,
    "builtins.list": list,
}


class Restricted(pickle.Unpickler):
    """An unpickler that accepts a fixed list of names."""

    def __init__(self, stream: BinaryIO, path: Path, allowed: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(stream, encoding="latin1")
        self.path = path
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object behind a name. Nothing is imported."""
        try:
            return self.allowed[f"{module}.{name}"]
        except KeyError:
            raise DataError(
                f"{self.path} asks for {module}.{name} and was refused; a data file may only contain arrays and "
                "dictionaries; get it from its official address"
            ) from None


def load(path: Path, allowed: Mapping[str, Callable[..., Any]] = ARRAYS) -> Any:
    """The object in a pickle file. A damaged file raises a DataError."""
    try:
        with path.open("rb") as stream:
            return Restricted(stream, path, allowed).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise DataError(f"{path} could not be read as a pickle ({error}); get the official file again") from error
