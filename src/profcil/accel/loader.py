"""Where kernels are found. Those for GPUs are modules that need Triton, which comes with torch's builds for them; those
for CPUs are files in C, compiled on a machine when they are first used. Without Triton or a compiler, plain torch is
used, which says what they compute and is what they are tested against."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from profcil.io.cache_folder import cache_folder

PACKAGE = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
PATIENCE = 60  # seconds for a compiler that should need one

_one = Lock()  # of several threads that ask for a library, one makes it


@cache
def found(module: str) -> Any:
    """A module of kernels by its name in this package, where Triton can be imported; None elsewhere."""
    try:
        return import_module(f"profcil.accel.{module}")
    except ImportError:
        return None


def built(file: str) -> ctypes.CDLL | None:
    """The library that a file in C makes, by its place in the package; None where no compiler makes it."""
    with _one:
        return compiled(file)


@cache
def compiled(file: str) -> ctypes.CDLL | None:
    source = PACKAGE / file
    facts = [source.read_text(encoding="utf-8"), *compiler(), *FLAGS, processor()]
    name = f"{source.stem}-{hashlib.blake2b('|'.join(facts).encode(), digest_size=12).hexdigest()}.so"
    kept = cache_folder() / "kernels" / name
    with suppress(OSError):
        return ctypes.CDLL(str(kept))
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory(prefix="profcil-") as folder:
        made = Path(folder) / name
        command = [*compiler(), *FLAGS, "-o", str(made), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
        library = ctypes.CDLL(str(made))
        with suppress(OSError):  # a folder that cannot be written costs a second each time, nothing else
            keep(made, kept)
        return library
    return None


def compiler() -> list[str]:
    """The machine's own, or the one that $CC names."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def keep(made: Path, kept: Path) -> None:
    """Whoever looks meanwhile finds the whole file or none."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    beside.write_bytes(made.read_bytes())
    beside.replace(kept)


def processor() -> str:
    """What tells processors apart whose code is not each other's: a cache may be that of several machines."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return platform.platform() + platform.processor()


def report(device: torch.device) -> dict[str, Any]:
    """Which kernels can be used on this machine."""
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device), "triton": triton_version()}
    return {"compiler": compiler_version()}


def triton_version() -> str | None:
    try:
        return str(import_module("triton").__version__)
    except (ImportError, AttributeError):
        return None


@cache
def compiler_version() -> str | None:
    """The first line that the compiler prints about itself; None without one."""
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        command = [*compiler(), "--version"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout.splitlines()[0]
    return None


def prepare(device: str) -> Thread:
    """Starts a thread that compiles the kernels for a CPU, or loads Triton for a GPU: that takes a second."""
    thread = Thread(target=read_triton if device == "cuda" else build_all, name="kernels", daemon=device == "cuda")
    thread.start()
    return thread


def read_triton() -> None:
    """Triton reads all of itself, to know which compiled kernels are its own."""
    with suppress(Exception):  # there is none, or it is another one: then nothing is won
        import_module("triton.runtime.cache").triton_key()


def build_all() -> None:
    for source in PACKAGE.rglob("*.c"):
        built(source.relative_to(PACKAGE).as_posix())
