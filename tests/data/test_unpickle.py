"""A forged pickle gives a DataError: it neither runs code, nor corrupts memory, nor fills it."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import official
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profcil.data import cifar100, cora, unpickle
from profcil.data.bundle import Bundle, Rows
from profcil.errors import DataError

CORA = Path(os.environ.get("PROFCIL_DATA", "data")) / "cora/raw"
CORA_DIGEST = "a78f95aad5a7a8c9"  # of the features, labels and edges that Python's own unpickler gave


def text(value: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(value)) + value


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def call(name: bytes, arguments: bytes) -> bytes:
    return b"c" + name + b"\n(" + arguments + b"tR"


def array(dtype: bytes, shape: bytes, raw: bytes) -> bytes:
    """The opcodes of an array with any type, shape and bytes."""
    empty = call(b"numpy.core.multiarray\n_reconstruct", b"cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b"))
    return empty + b"(" + number(1) + b"(" + shape + b"t" + dtype + b"I00\n" + text(raw) + b"tb"


def forged(data: bytes) -> bytes:
    """A CIFAR-100 file whose pixels are the given opcodes."""
    return b"\x80\x02}(" + text(b"data") + data + text(b"fine_labels") + b"](K\x00eu."


BYTE = call(b"numpy\ndtype", text(b"u1"))
OBJECT = call(b"numpy\ndtype", text(b"O8"))
FIELDS = b"}(" + text(b"a") + b"(" + OBJECT + number(0) + b"tu"
STATE = b"(" + number(3) + text(b"|") + b"N(" + text(b"a") + b"t" + FIELDS + number(8) + number(1) + number(0) + b"tb"
STRUCTURE = call(b"numpy\ndtype", text(b"V8")) + STATE  # a structure of objects that claims to have none
ADDRESS = struct.pack("<Q", 0x4141414141414141)
NESTED = b"}" + b")" + b"\x85" * 2_000_000 + b"Ns"  # a dictionary whose key is a tuple in a tuple in a tuple ...
ENCODED = b"c_codecs\nencode\n(h\x00" + text(b"latin1") + b"tR"
ATTACKS = {
    "an address becomes an object": array(STRUCTURE, number(1), ADDRESS),
    "a type of objects": array(OBJECT, number(1), ADDRESS),
    "a shape larger than the bytes": array(BYTE, number(2**31 - 1) * 3, b"x"),
    "a negative shape": array(BYTE, number(-1), b"x"),
    "a key that is nested too deeply": NESTED,
    "a memo index of four billion": b"Nr" + struct.pack("<I", 2**32 - 1),
    "numpy.ndarray as a function": call(b"numpy\nndarray", b"(" + number(1) + b"t" + text(b"u1") + text(b"x")),
    "attributes of our own code": b"c_codecs\nencode\n(N}(" + text(b"__defaults__") + b")utb",
    "one text encoded again and again": b"]("
    + text(b"x" * 10_000)
    + b"q\x00"
    + (b"c_codecs\nencode\n(h\x00" + text(b"latin1") + b"tR") * 3
    + b"e",
}
READ_FORGED = Path(__file__).with_name("read_forged.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What happened to a process that read the file of each attack."""
    folder = tmp_path_factory.mktemp("forged")
    files = [folder / str(i) for i in range(len(ATTACKS))]
    for file, opcodes in zip(files, ATTACKS.values(), strict=True):
        file.write_bytes(forged(opcodes))
    command = [sys.executable, str(READ_FORGED), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines() + [f"not read: {done.stderr[-300:]}"] * len(files)
    return dict(zip(ATTACKS, lines, strict=False))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_file_is_refused_by_a_process_that_lives(attack: str, outcomes: dict[str, str]) -> None:
    assert outcomes[attack] == "refused"


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<i8", "<f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_equal_to_the_bit(dtype: str, order: str, tmp_path: Path) -> None:
    given = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)
    for protocol in (2, 3, 4):
        (tmp_path / "array").write_bytes(pickle.dumps(given, protocol=protocol))
        found = unpickle.array(unpickle.load(tmp_path / "array"))
        assert found.dtype == given.dtype and found.flags.writeable
        assert found.tobytes() == given.tobytes()


def test_lists_in_lists_and_repeated_values_are_read(tmp_path: Path) -> None:
    shared = [1, 2.5, "three", b"four", None, True, 2**40]
    content = {"a": shared, "b": (shared, shared), 3: {"c": []}}
    for protocol in (0, 2, 4):
        (tmp_path / "content").write_bytes(pickle.dumps(content, protocol=protocol))
        assert unpickle.load(tmp_path / "content") == content


@pytest.mark.skipif(not CORA.exists(), reason="needs the official files under $PROFCIL_DATA")
def test_the_official_cora_files_give_the_same_bits() -> None:
    x, labels, edges = cora.assemble(CORA)
    total = hashlib.blake2b(digest_size=8)
    for values in (x, labels, edges):
        total.update(values.tobytes())
    assert total.hexdigest() == CORA_DIGEST


mutation = st.tuples(
    st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "cut", "insert"]), st.binary(max_size=9)
)


def mutated(content: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    """A file with some bytes overwritten, removed or added."""
    out = bytearray(content)
    for place, what, new in changes:
        at = int(place * len(out))
        end = at if what == "insert" else at + max(len(new), 1)
        out[at:end] = b"" if what == "cut" else new
    return bytes(out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutated")
    official.cifar_python(root / "cifar-100-python")
    official.cora(root / "cora")
    return root


@settings(max_examples=150, deadline=None)
@example([])
@given(st.lists(mutation, min_size=1, max_size=4))
def test_a_mutated_cifar_file_gives_images_or_a_data_error(folders: Path, changes: list) -> None:
    content = (folders / "cifar-100-python/test").read_bytes()
    path = folders / "mutated"
    head = 220  # the pixels behind it are not worth many trials
    path.write_bytes(mutated(content[:head], changes) + content[head:])
    try:
        assert isinstance(cifar100.read_python(path), Rows)
    except DataError as error:
        assert changes and "\n" not in str(error)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["allx", "tx", "ally", "ty", "graph"]), st.lists(mutation, min_size=1, max_size=4))
def test_mutated_cora_files_give_a_bundle_or_a_data_error(folders: Path, end: str, changes: list) -> None:
    facts = replace(cora.FACTS, classes=2, files=tuple(replace(file, size=None) for file in cora.FACTS.files))
    path = folders / f"cora/ind.cora.{end}"
    content = path.read_bytes()
    try:
        path.write_bytes(mutated(content, changes))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cora, "FACTS", facts)
            assert isinstance(cora.load(folders), Bundle)
    except DataError as error:
        assert "\n" not in str(error)
    finally:
        path.write_bytes(content)
