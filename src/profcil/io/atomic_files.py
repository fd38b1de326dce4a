"""Atomic writes: a temporary file is written, flushed and renamed. Tensors are safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # text and JSON are written without torch
    from torch import Tensor

# Facts are in the header of a file of tensors, which the format limits to 100 MB. Texts longer than this, e.g. the
# ledger of a long run, are stored as tensors.
LONG_TEXT = 1_000_000  # characters
TEXT_PREFIX = "text/"


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file atomically: after a crash there is the old file or the new one."""
    write_files({path: data})


def write_files(files: Mapping[Path, bytes]) -> None:
    """Replaces several files, each atomically. No file is replaced before all are written, so that a full disk or a
    missing permission leaves all of them as they were."""
    for path in filter(is_special, files):
        with explain_target(path):
            path.write_bytes(files[path])
    files = {path: data for path, data in files.items() if not is_special(path)}
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in files}
    try:
        for path, draft in drafts.items():
            write_draft(path, draft, files[path])
        for path, draft in drafts.items():
            with explain_target(path):
                os.replace(draft, path)
        for folder in {path.parent for path in files}:
            sync_folder(folder)
    except BaseException:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        raise


def write_draft(path: Path, draft: Path, data: bytes) -> None:
    """Writes the temporary file of a target to the disk."""
    with explain_target(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or a socket. Such a target is written to: a rename would replace it."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def sync_folder(folder: Path) -> None:
    """Writes a folder's entries to the disk: without it, a new name may be lost when the power fails."""
    with suppress(OSError):  # some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def explain_target(path: Path) -> Iterator[None]:
    """Names the target in errors: a full disk names no file, and the user does not know the draft."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        error.filename2 = None
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors and plain facts into one file, atomically. The file contains a digest of both."""
    write_host_tensors(path, host_copies(tensors), facts)


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the host. Copies from a GPU are asynchronous, with one synchronisation for all."""
    import torch

    copies = {k: v.detach().to("cpu", copy=True, non_blocking=True) for k, v in tensors.items()}
    for device in {v.device for v in tensors.values() if v.is_cuda}:
        torch.cuda.synchronize(device)
    return {k: v.contiguous() for k, v in copies.items()}


def write_host_tensors(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Like `write_tensors`, for tensors that are on the host, contiguous and without shared memory."""
    from safetensors.torch import save

    long_texts = {name: value for name, value in facts.items() if isinstance(value, str) and len(value) > LONG_TEXT}
    everything = tensors | {TEXT_PREFIX + name: text_tensor(value) for name, value in long_texts.items()}
    text = json.dumps({name: value for name, value in facts.items() if name not in long_texts})
    write_bytes(path, save(everything, metadata={"facts": text, "digest": digest(everything, text)}))


def text_tensor(text: str) -> Tensor:
    """A text as a tensor of bytes."""
    import torch

    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and facts of a file by `write_tensors`; None if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            # Copied: memory-mapped tensors are unaligned, and kernels would add them in another order.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        if metadata["digest"] != digest(tensors, metadata["facts"]):
            return None
        facts = json.loads(metadata["facts"])
        for name in [name for name in tensors if name.startswith(TEXT_PREFIX)]:
            facts[name.removeprefix(TEXT_PREFIX)] = tensors.pop(name).numpy().tobytes().decode()
        return tensors, facts
    except (SafetensorError, OSError, KeyError, ValueError):
        return None


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts in the header of a file by `write_tensors`, without long texts; None if it cannot be read. The tensors
    are not read, and the digest is not compared."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            facts = json.loads((file.metadata() or {})["facts"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """A hash of names, shapes, types and values, and of a text."""
    import torch

    total = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        total.update(f"{name}{tuple(t.shape)}{t.dtype}".encode())
        flat = t.flatten()
        if flat.stride() != (1,):  # possible for a single value; `view` needs stride 1
            flat = flat.clone(memory_format=torch.contiguous_format)
        total.update(flat.view(torch.uint8).numpy().data)
    return total.hexdigest()
