"""Reads the pickles among official data files, without Python's unpickler.

A pickle is a program: it can name any function, call it, and set any attribute. Here the program is read opcode by
opcode, and only those opcodes and names are known that arrays, dictionaries and sparse matrices need. Nothing is
imported and no object other than ours is built. What a file can take in memory is bounded by its size. Python 2 strings
are read as latin1, which preserves array bytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profcil.data._pickled_arrays import Array, NumberType, Sparse, array, densify, integers
from profcil.errors import DataError

__all__ = ["ARRAYS", "GRAPHS", "Sparse", "array", "densify", "integers", "load"]

MAX_BYTES = 2**30  # of a file; the largest official pickle has 155 million
MARK = object()


class PickledName:
    """A name that a pickle may use. It is never the object behind the name."""

    def __init__(self, make: Callable[..., Any] | None) -> None:
        self.make = make  # what a call of the name gives; None if the name cannot be called


def reconstruct(kind: Any, *_: Any) -> Array:
    """An empty array, which a BUILD fills."""
    if kind is not NDARRAY:
        raise ValueError("an array of another class than numpy.ndarray is not allowed")
    return Array()


def latin1(text: Any, encoding: Any) -> bytes:
    """What protocol 2 calls to restore bytes. Only latin1 is allowed."""
    if encoding != "latin1" or type(text) is not str:
        raise ValueError("an encoding other than latin1 is not allowed")
    return text.encode("latin1")


NDARRAY = PickledName(None)
LIST = PickledName(None)
RECONSTRUCT = PickledName(reconstruct)
ENCODE = PickledName(latin1)
CSR = PickledName(Sparse)
ARRAYS: Mapping[str, PickledName] = {
    "numpy.core.multiarray._reconstruct": RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": RECONSTRUCT,
    "numpy.ndarray": NDARRAY,
    "numpy.dtype": PickledName(NumberType),
    "_codecs.encode": ENCODE,
}
GRAPHS: Mapping[str, PickledName] = {
    **ARRAYS,
    "scipy.sparse.csr.csr_matrix": CSR,
    "scipy.sparse._csr.csr_matrix": CSR,
    "collections.defaultdict": PickledName(lambda factory=None: {}),
    "__builtin__.list": LIST,
    "builtins.list": LIST,
}

VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": MARK, "EMPTY_TUPLE": ()}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Reader:
    """Executes the opcodes of one pickle."""

    def __init__(self, path: Path, size: int, allowed: Mapping[str, PickledName]) -> None:
        self.path = path
        self.encoded_left = size  # encoding one long text again and again must not fill the memory
        self.allowed = allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        """The object that a pickle describes."""
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in VALUES:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name == "STOP":
                return self.pop()
            else:
                self.execute(name, argument)
        raise ValueError("it has no end")

    def execute(self, name: str, argument: Any) -> None:
        """Executes an opcode that is not a plain value."""
        if name in SHORT_TUPLES:
            self.stack.append(tuple(self.pop_last(SHORT_TUPLES[name])))
        elif name in STEPS:
            STEPS[name](self, argument)
        else:
            raise ValueError(f"it uses {name}, which no data file needs")

    def pop(self) -> Any:
        return self.pop_last(1)[0]

    def pop_last(self, count: int) -> list[Any]:
        """Removes the last values, above which there is no mark."""
        values = self.stack[-count:]
        if len(values) < count or any(value is MARK for value in values):
            raise ValueError("it takes a value that is not there")
        del self.stack[-count:]
        return values

    def pop_to_mark(self) -> list[Any]:
        """Removes all values above the last mark, and the mark."""
        for k in range(len(self.stack) - 1, -1, -1):
            if self.stack[k] is MARK:
                values = self.stack[k + 1 :]
                del self.stack[k:]
                return values
        raise ValueError("it takes a mark that is not there")

    def top(self, kind: type) -> Any:
        """The last value, which must be of a type."""
        if not self.stack or type(self.stack[-1]) is not kind:
            raise ValueError(f"it changes something that is not a {kind.__name__}")
        return self.stack[-1]

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Adds pairs to a dictionary. Keys are texts or whole numbers: hashing nested ones can exhaust the stack."""
        target = self.top(dict)
        keys = values[::2]
        if len(values) % 2 or any(type(key) not in (str, bytes, int) for key in keys):
            raise ValueError("a dictionary has keys that are neither texts nor whole numbers")
        target.update(zip(keys, values[1::2], strict=True))

    def memoize(self, index: int) -> None:
        if not self.stack or self.stack[-1] is MARK:
            raise ValueError("it stores a value that is not there")
        self.memo[index] = self.stack[-1]

    def find(self, module: Any, name: Any) -> None:
        """Adds an allowed name to the stack."""
        are_texts = type(module) is str and type(name) is str
        full = f"{module}.{name}" if are_texts else ""
        if full not in self.allowed:
            raise DataError(
                f"{self.path} asks for {ascii(full)[1:80].rstrip(QUOTES)} and was refused; a data file may only "
                "contain arrays and dictionaries; get it from its official address"
            )
        self.stack.append(self.allowed[full])

    def call(self, new: bool) -> None:
        """Calls a name with arguments. NEWOBJ is for sparse matrices only, and REDUCE for all others."""
        callee, arguments = self.pop_last(2)
        can_be_called = type(callee) is PickledName and callee.make is not None and type(arguments) is tuple
        if not can_be_called or new != (callee is CSR):
            raise ValueError("it calls something that cannot be called")
        if callee is ENCODE:
            self.encoded_left -= sum(len(text) for text in arguments if type(text) is str)
        if self.encoded_left < 0:
            raise ValueError("it takes more memory than its size allows")
        self.stack.append(callee.make(*arguments))

    def build(self) -> None:
        """Fills an array, a numeric type or a sparse matrix."""
        target, state = self.pop_last(2)
        if type(target) not in (Array, NumberType, Sparse):
            raise ValueError("it fills something that is no array")
        target.build(state)
        self.stack.append(target)


def put_container(make: Callable[[list[Any]], Any]) -> Callable[[Reader, Any], None]:
    """A step that makes a container of what lies above the last mark."""
    return lambda reader, _: reader.stack.append(make(reader.pop_to_mark()))


def make_dictionary(reader: Reader) -> None:
    values = reader.pop_to_mark()
    reader.stack.append({})
    reader.set_items(values)


QUOTES = "'\""
STEPS: Mapping[str, Callable[[Reader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "FRAME": lambda reader, _: None,
    "EMPTY_LIST": lambda reader, _: reader.stack.append([]),
    "EMPTY_DICT": lambda reader, _: reader.stack.append({}),
    "LIST": put_container(list),
    "TUPLE": put_container(tuple),
    "DICT": lambda reader, _: make_dictionary(reader),
    "APPEND": lambda reader, _: reader.append(reader.pop_last(1)),
    "APPENDS": lambda reader, _: reader.append(reader.pop_to_mark()),
    "SETITEM": lambda reader, _: reader.set_items(reader.pop_last(2)),
    "SETITEMS": lambda reader, _: reader.set_items(reader.pop_to_mark()),
    "PUT": lambda reader, index: reader.memoize(index),
    "BINPUT": lambda reader, index: reader.memoize(index),
    "LONG_BINPUT": lambda reader, index: reader.memoize(index),
    "MEMOIZE": lambda reader, _: reader.memoize(len(reader.memo)),
    "GET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "LONG_BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "GLOBAL": lambda reader, name: reader.find(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda reader, _: reader.find(*reader.pop_last(2)),
    "REDUCE": lambda reader, _: reader.call(new=False),
    "NEWOBJ": lambda reader, _: reader.call(new=True),
    "BUILD": lambda reader, _: reader.build(),
}


def load(path: Path, allowed: Mapping[str, PickledName] = ARRAYS) -> Any:
    """The object in a pickle file, with its arrays as `Array`. A damaged file raises a DataError."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, allowed are {MAX_BYTES}")
        return Reader(path, size, allowed).read(path.read_bytes())
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        reason = ascii(str(error))[1:200].rstrip(QUOTES)
        raise DataError(f"{path} could not be read as a pickle ({reason}); get the official file again") from error
