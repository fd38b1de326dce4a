"""Kernels for GPUs are modules that need Triton, which comes with torch's builds for them. Without it, plain torch is
used, which says what they compute and is what they are tested against."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from threading import Thread
from typing import Any


@cache
def found(module: str) -> Any:
    """A module of kernels by its place in the package, where Triton can be imported; None elsewhere."""
    try:
        return import_module(f"profcil.{module}")
    except ImportError:
        return None


def wake() -> Thread:
    """Begins, beside whatever else is to be done, what takes a second before a first kernel can be made: Triton reads
    all of itself, to know which compiled ones are its own."""

    def read() -> None:
        with suppress(Exception):  # there is none, or it is another one: then nothing is won
            import_module("triton.runtime.cache").triton_key()

    thread = Thread(target=read, name="triton", daemon=True)
    thread.start()
    return thread
