"""Bounds on a message before it is decoded: its bytes, records, arrays, the depth of its header, and npy headers.

Decoding then never takes more memory than the message has bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from flwr.app import Array, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_body
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry

from profcil.io.npy import read_npy

MAX_HEAD = 4 << 20  # bytes of the JSON header
MAX_DEPTH = 8  # of lists and tables within each other in the header
MAX_ARRAYS = 100_000  # in one message
TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)  # a string, also an unfinished one, or a bracket
STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def check_size(content: RecordDict, most: float) -> None:
    """Raises a ValueError if a message has more bytes or arrays than allowed."""
    sizes = [len(array.data) for record in content.array_records.values() for array in record.values()]
    if len(sizes) > MAX_ARRAYS or len(content) > MAX_ARRAYS:
        raise ValueError(f"it has more than {MAX_ARRAYS} arrays")
    if sum(sizes) > most:
        raise ValueError(f"it has {sum(sizes) / 1e6:.0f} MB, allowed are {most / 1e6:g} MB")


def read_head(content: RecordDict, name: str) -> dict[str, Any]:
    """The header of a message, a JSON table."""
    text = str(content.config_records[name]["json"])
    if len(text) > MAX_HEAD:
        raise ValueError(f"its header has more than {MAX_HEAD} bytes")
    if depth(text) > MAX_DEPTH:
        raise ValueError(f"its header is nested more than {MAX_DEPTH} times")
    head = json.loads(text)
    if not isinstance(head, dict):
        raise ValueError("its header is not a table")
    return head


def depth(text: str) -> int:
    """How deep lists and tables of a JSON text lie within each other."""
    deepest = 0
    level = 0
    for token in TOKEN.finditer(text):
        level += STEPS.get(text[token.start()], 0)
        deepest = max(deepest, level)
    return deepest


def read_array(array: Array) -> np.ndarray:
    """The values of an array that was sent as npy. Its header must describe the bytes that are there."""
    if array.stype != "numpy.ndarray":
        raise ValueError("an array is not in numpy's format, or repeats a part too often")
    return read_npy(array.data)


@dataclass(frozen=True)
class BoundedArrays:
    """Takes the place of Flower's class where arrays are put together from chunks.

    An array may name one chunk many times, so that a short message would become an array of any size. Such an array is
    replaced by one without values, which cannot be read.
    """

    most: float  # bytes of one array

    def inflate(self, object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        chunks = children or {}
        parts = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
        longest = max((len(chunk.data) for chunk in chunks.values()), default=0)
        if len(parts) * longest > max(self.most, longest):
            return Array("refused", (), "refused", b"")
        return Array.inflate(object_content, chunks)


def bound_arrays(most: float) -> None:
    """Bounds the arrays that this process receives over Flower."""
    inflatable_class_registry["Array"] = cast(Any, BoundedArrays(most))
