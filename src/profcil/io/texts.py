"""Texts of others, made safe for a log and a terminal."""

from __future__ import annotations

from typing import Any

LONGEST = 300  # characters


def one_line(text: Any, longest: int = LONGEST) -> str:
    """A text of one line without control characters, which a terminal would execute, and cut if it is too long."""
    start = str(text)[: longest + 1]
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in start)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
