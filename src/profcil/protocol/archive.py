"""The file of a plan: a zip of plain arrays and a JSON header, without pickles, written atomically."""

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

Built = TypeVar("Built")
READ_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, ConfigError)


def encode(header: dict[str, Any]) -> bytes:
    """A header as canonical JSON, so that it can be hashed."""
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def write(path: str | Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write the file atomically: a temporary file is written and then renamed."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            encoded = np.frombuffer(encode(header), dtype=np.uint8)
            members: dict[str, Any] = {"header": encoded, **arrays}
            np.savez_compressed(file, **members)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RunFolderError(
            f"the plan cannot be written to {path} ({error.strerror}); choose another folder"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def read(path: str | Path, build: Callable[[dict[str, Any], dict[str, np.ndarray]], Built]) -> Built:
    """What `build` makes of the header and the arrays. An unreadable file is a DataError."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
            header = json.loads(arrays.pop("header").tobytes())
            return build(header, arrays)
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as a stream plan ({reason}); make and save the plan again") from error
