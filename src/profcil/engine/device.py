"""The device that a run is computed on, and the numbers of threads and workers."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from profcil.data.bundle import Bundle
from profcil.errors import ConfigError
from profcil.resolve import RunConfig

MAX_THREADS = 1024  # a larger number of threads or workers is a typing mistake and would exhaust the memory
LARGE_INPUT = 3 * 32 * 32  # bytes of an image from which on one step can use several threads


def device_of(name: str) -> torch.device:
    """The torch device with this name, if runs can be computed on it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device '{name}'; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        check_gpu(name, device.index or 0)
    return device


def check_gpu(name: str, index: int) -> None:
    """Refuses a GPU that this machine does not have."""
    if not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was given, but this machine has no usable CUDA GPU; use --device cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device '{name}' was given, but the number of CUDA GPUs on this machine is {count}; "
            f"use cuda, or cuda:N with N from 0 to {count - 1}"
        )


def set_threads(config: RunConfig, bundle: Bundle) -> int:
    """Sets torch's number of threads and returns the number of workers.

    In small steps a second thread costs more time than it saves, above all on a busy machine. There each core computes
    another client instead.
    """
    check_count("threads", config.threads)
    check_count("workers", config.workers)
    cores = usable_cores()
    large = has_large_inputs(bundle)
    torch.set_num_threads(config.threads or (cores if large else 1))
    one_worker = large or torch.get_num_threads() > 1
    workers = config.workers or (1 if one_worker else cores)
    return min(workers, config.stream.participants)  # each worker holds a model, and computes at least one client


def check_count(name: str, given: int) -> None:
    """Refuses an implausible number of threads or workers."""
    if given > MAX_THREADS:
        raise ConfigError(
            f"{name} is {given}, allowed is at most {MAX_THREADS}; set it to 0 to choose a number for this machine"
        )


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """The processor's model name, or where the system does not tell it, the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def has_large_inputs(bundle: Bundle) -> bool:
    """Whether the examples are images of at least 32x32 pixels in three colours, or as many bytes."""
    x = bundle.train.inputs(torch.zeros(1, dtype=torch.long))[0]
    return x.dtype == torch.uint8 and x[0].numel() >= LARGE_INPUT
