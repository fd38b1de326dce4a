"""What computes a run: its memory, software and hardware."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from profcil.engine.device import processor_name, usable_cores
from profcil.engine.world import World


def peak_memory_mb(world: World) -> float:
    """The peak memory of the process, or on a GPU the peak of the memory that torch reserved there. Allocated memory
    would be too little: it leaves out the buffers of recorded CUDA graphs."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return peak * unit / 1e6


def resident_mb() -> float | None:
    """The process's resident memory now; None where the system has no /proc/self/statm."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * resource.getpagesize() / 1e6


def environment(world: World) -> dict[str, Any]:
    """The software and hardware that computed the run."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processor": processor_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
