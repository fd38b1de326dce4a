"""Arrays in numpy's npy and npz formats from files and messages of others.

numpy allocates what a header claims before it reads the values. Here the header must describe the bytes that are there.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = "biuf"  # the kinds of numpy types that a tensor can have: booleans, integers, floating point
TEXTS = "US"
MAX_HEADER = 4096  # bytes
READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What numpy's parser, which is Python's own, raises for a header of any bytes.
HEADER_ERRORS = (ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OverflowError)


def read_npy(data: bytes, kinds: str = NUMBERS) -> np.ndarray:
    """The array in the bytes of an npy file. Anything but an array of these kinds of types raises a ValueError."""
    file = BytesIO(data)
    shape, fortran, dtype = read_header(file)
    if dtype.kind not in kinds:
        raise ValueError(f"an array has values of type {dtype}")
    if min(shape, default=0) < 0:
        raise ValueError(f"an array has the shape {shape}")
    rest = len(data) - file.tell()
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"an array claims the shape {shape} of {dtype}, but has {rest} bytes")
    if not rest:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran else "C").copy()


def read_header(file: BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, whether columns come first, and the type in the header of an npy file."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in READERS:
            raise ValueError("its version is unknown")
        return READERS[version](file, max_header_size=MAX_HEADER)
    except HEADER_ERRORS as error:
        raise ValueError(f"an array has a header that numpy cannot read ({str(error)[:200]})") from None


def read_npz(path: Path, kinds: str = NUMBERS + TEXTS) -> dict[str, np.ndarray]:
    """The arrays in an npz file by name. A file that is none raises a ValueError."""
    with open_npz(path) as archive:
        return {name.removesuffix(".npy"): read_npy(archive.read(name), kinds) for name in archive.namelist()}


def npz_names(path: Path) -> set[str]:
    """The names of the arrays in an npz file. A file that is none raises a ValueError."""
    with open_npz(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


@contextmanager
def open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (*ZIP_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the file itself cannot be read
            raise
        raise ValueError(f"it is not an npz file ({error})") from None
