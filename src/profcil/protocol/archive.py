"""A plan's file: a zip of plain arrays with a JSON header inside, no pickle, written atomically."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from profcil.errors import ConfigError, DataError, RunFolderError

Made = TypeVar("Made")
BROKEN = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, ConfigError)


def encode(header: dict[str, Any]) -> bytes:
    """The one spelling of a header, so that it can be hashed."""
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def write(path: str | Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write beside the target and rename: a reader meets the old file or the new one, never a part."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            everything: dict[str, Any] = {"header": np.frombuffer(encode(header), dtype=np.uint8), **arrays}
            np.savez_compressed(file, **everything)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RunFolderError(
            f"the plan cannot be written to {path} ({error.strerror}); choose another folder"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def read(path: str | Path, make: Callable[[dict[str, Any], dict[str, np.ndarray]], Made]) -> Made:
    """What `make` builds from the header and arrays; whatever is wrong with the file is one sentence."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files if name != "header"}
            return make(json.loads(stored["header"].tobytes()), arrays)
    except BROKEN as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as a stream plan ({reason}); make and save the plan again") from error
