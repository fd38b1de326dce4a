"""Files that are whole or not there: written beside, flushed, then renamed. Tensors as safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # text and JSON are written without torch
    from torch import Tensor


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file atomically; a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a full disk names no file, and ours is not `beside`
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and plain facts in one atomic file, with a digest of both: safetensors itself has none."""
    write_copies(path, copies(tensors), facts)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, on the host. From a GPU they come together, and are waited for once."""
    import torch

    fetched = {k: v.detach().to("cpu", copy=True, non_blocking=True) for k, v in tensors.items()}
    for device in {v.device for v in tensors.values() if v.is_cuda}:
        torch.cuda.synchronize(device)
    return {k: v.contiguous() for k, v in fetched.items()}


def write_copies(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    """`write_tensors` of tensors that are on the host, without gaps and without memory in common."""
    from safetensors.torch import save

    text = json.dumps(facts)
    write_bytes(path, save(tensors, metadata={"facts": text, "digest": digest(tensors, text)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `write_tensors` wrote, or None where a single bit of it is not readable as that."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            # Copied: mapped from the file they lie unaligned, and kernels would round them in another order.
            tensors, about = {k: file.get_tensor(k).clone() for k in file.keys()}, file.metadata() or {}  # noqa: SIM118
        return (tensors, json.loads(about["facts"])) if about["digest"] == digest(tensors, about["facts"]) else None
    except (SafetensorError, OSError, KeyError, ValueError):
        return None


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    import torch

    total = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        total.update(f"{name}{tuple(t.shape)}{t.dtype}".encode())
        flat = t.flatten()
        if flat.stride() != (1,):  # as a single number may have it
            flat = flat.clone(memory_format=torch.contiguous_format)
        total.update(flat.view(torch.uint8).numpy().data)
    return total.hexdigest()
