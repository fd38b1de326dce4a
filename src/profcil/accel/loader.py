"""Loads kernels. Those for GPUs are modules that need Triton, which comes with torch's CUDA builds. Those for CPUs are
C files, compiled on first use. Without Triton or a compiler, plain torch is used, which is also the reference in tests.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from profcil.io.atomic_files import write_bytes
from profcil.io.cache_folder import cache_folder, make_private_folder

PACKAGE = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
FOLDER = "compiled"  # in the cache folder
COMPILER_TIMEOUT = 60  # timeout of the compiler in seconds; it usually takes one

_compile_lock = Lock()  # only one thread compiles at a time


@cache
def kernel_module(module: str) -> Any:
    """A module of kernels, by its name in this package; None where Triton cannot be imported."""
    try:
        return import_module(f"profcil.accel.{module}")
    except ImportError:
        return None


def c_library(file: str) -> ctypes.CDLL | None:
    """The shared library compiled from a C file, by its path in this package; None where it cannot be compiled."""
    with _compile_lock:
        return load_or_compile(file)


@cache
def load_or_compile(file: str) -> ctypes.CDLL | None:
    """As `c_library`, from the cache where it is there. The cache key covers source, compiler, flags and processor."""
    source = PACKAGE / file
    key = "|".join([source.read_text(encoding="utf-8"), *compiler(), *FLAGS, processor()])
    name = f"{source.stem}-{digest(key.encode())}"
    folder = cache_folder() / FOLDER
    with suppress(OSError):
        cached = trusted_library(folder, name)
        if cached is not None:
            return ctypes.CDLL(str(cached))
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory(prefix="profcil-") as temporary:
        output = Path(temporary) / f"{name}.so"
        command = [*compiler(), *FLAGS, "-o", str(output), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILER_TIMEOUT)
        library = ctypes.CDLL(str(output))
        with suppress(OSError):  # without a writable cache of one's own, every process compiles again
            store(output.read_bytes(), folder, name)
        return library
    return None


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def trusted_library(folder: Path, name: str) -> Path | None:
    """The cached library of a name; None if there is none that only this user can have written.

    A library is code. So the folder and the file must belong to the user, no other user may write them, and the
    content must have the digest that is part of the file's name.
    """
    if not belongs_to_user(folder.lstat(), stat.S_ISDIR):
        return None
    for path in folder.glob(f"{name}-*.so"):
        if belongs_to_user(path.lstat(), stat.S_ISREG) and path.stem == f"{name}-{digest(path.read_bytes())}":
            return path
    return None


def belongs_to_user(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether a file or folder, not a link to one, belongs to this user and no other user may write it."""
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def compiler() -> list[str]:
    """The compiler command: $CC, or `cc`."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def store(library: bytes, folder: Path, name: str) -> None:
    """Writes a library into the cache, atomically, with its digest in the name. Older versions of it are removed."""
    make_private_folder(folder)
    if not belongs_to_user(folder.lstat(), stat.S_ISDIR):
        return
    for other in folder.glob(f"{name}-*.so"):
        other.unlink(missing_ok=True)
    cached = folder / f"{name}-{digest(library)}.so"
    write_bytes(cached, library)
    cached.chmod(0o600)


def processor() -> str:
    """The processor's features: machines with different processors may share a cache folder."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = (line for line in lines if line.startswith(("flags", "Features")))
        return next(features, platform.machine())
    return platform.platform() + platform.processor()


def report(device: torch.device) -> dict[str, Any]:
    """GPU and Triton version, or the compiler's version; None for what is missing."""
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device), "triton": triton_version()}
    return {"compiler": compiler_version()}


def triton_version() -> str | None:
    """Triton's version; None without it."""
    try:
        return str(import_module("triton").__version__)
    except (ImportError, AttributeError):
        return None


@cache
def compiler_version() -> str | None:
    """The first line of the compiler's `--version`; None without a compiler."""
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        command = [*compiler(), "--version"]
        process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILER_TIMEOUT)
        return process.stdout.splitlines()[0]
    return None


def prepare(device: str) -> Thread:
    """Starts a thread that compiles the C kernels, or on a GPU loads Triton. Either takes about a second."""
    on_gpu = device == "cuda"
    target = load_triton if on_gpu else build_all
    thread = Thread(target=target, name="kernels", daemon=on_gpu)
    thread.start()
    return thread


def load_triton() -> None:
    """Has Triton compute the hash of its own files, which its kernel cache needs. Triton stores the result."""
    with suppress(Exception):  # no Triton, or a version without this function
        import_module("triton.runtime.cache").triton_key()


def build_all() -> None:
    """Compiles all C files of this package."""
    for source in PACKAGE.rglob("*.c"):
        c_library(source.relative_to(PACKAGE).as_posix())
