"""Changes of files, messages and command lines, as accidents and attackers make them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PROFCIL_FUZZ", "6"))  # of each test; `make fuzz` sets many more
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 6,  # the default suite is the same every time
    suppress_health_check=list(HealthCheck),
)
ODD = [
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\x1b[2J", "\u202e".encode(), b'"', b"'", b",", b"\\"),
    *(b"-1", b"0", b"1e999", b"-inf", b"nan", b"NaN", b"null", b"true", b"99999999999999999999", b"2147483648"),
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"(" * 3000, b"9" * 5000, b"../../x", b"/etc/passwd", b"%s%n"),
]


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, bytes]]:
    """A few changes of a file: what is done, where (a share of its length), and with what."""
    what = st.sampled_from(["insert", "replace", "flip", "cut", "repeat", "delete"])
    where = st.floats(0, 1, allow_nan=False)
    value = st.one_of(st.sampled_from(ODD), st.binary(max_size=8))
    return draw(st.lists(st.tuples(what, where, value), min_size=1, max_size=3))


def apply(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for what, where, value in changes:
        at = int(where * len(data))
        after = data[at + max(1, len(value)) :]
        if what == "insert":
            data = data[:at] + value + data[at:]
        elif what == "replace":
            data = data[:at] + value + after
        elif what == "flip" and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ (1 << (len(value) % 8))]) + data[at + 1 :]
        elif what == "cut":
            data = data[:at]
        elif what == "repeat":
            data = data[:at] + data[at : at + 64] * 3 + data[at:]
        elif what == "delete":
            data = data[:at] + after
    return data


def read_files(folder: Path) -> dict[str, bytes]:
    """The content of every file in a folder, by its path there."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
