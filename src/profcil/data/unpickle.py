"""Reading official pickles without running what they say.

A pickle can name any function and call it. Here it may only name what arrays, dictionaries and sparse matrices need;
every other name is refused before it is imported. Python 2 strings are read as latin1, which keeps array bytes.
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
    """Stands in for scipy's CSR matrix, so that untrusted index arrays never reach compiled code unchecked."""

    def dense(self) -> np.ndarray:
        """The matrix as float32 [rows, columns]."""
        state = self.__dict__
        shape = state["_shape"] if "_shape" in state else state["shape"]
        return densify(state["data"], state["indices"], state["indptr"], tuple(shape))


def densify(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """A dense float32 matrix from CSR arrays; arrays that contradict each other are a ValueError."""
    counts = np.diff(indptr)
    if len(counts) != shape[0] or (counts < 0).any() or counts.sum() != len(data) or len(data) != len(indices):
        raise ValueError("the sparse matrix contradicts itself")
    if len(indices) and not 0 <= indices.min() <= indices.max() < shape[1]:
        raise ValueError("the sparse matrix has columns outside its shape")
    dense = np.zeros(shape, dtype=np.float32)
    dense[np.repeat(np.arange(shape[0]), counts), indices] = data
    return dense


def latin1(text: str, encoding: str) -> bytes:
    """What Python 3 writes in place of bytes at protocol 2: a call to encode, here for this one encoding only."""
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding}")
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
    """An unpickler that knows a fixed list of names."""

    def __init__(self, stream: BinaryIO, path: Path, allowed: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(stream, encoding="latin1")
        self.path, self.allowed = path, allowed

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object behind a name; the import machinery is never asked."""
        try:
            return self.allowed[f"{module}.{name}"]
        except KeyError:
            raise DataError(
                f"{self.path} asks for {module}.{name}, which a data file has no need of, and was refused; "
                "only plain arrays and dictionaries are read; get the file from its official address"
            ) from None


def load(path: Path, allowed: Mapping[str, Callable[..., Any]] = ARRAYS) -> Any:
    """The object in a pickle file; a damaged file is an error in one sentence."""
    try:
        with path.open("rb") as stream:
            return Restricted(stream, path, allowed).load()
    except DataError:
        raise
    except Exception as error:  # a broken pickle can raise anything at all
        raise DataError(f"{path} could not be read as a pickle ({error}); get the official file again") from error
