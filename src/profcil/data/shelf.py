"""The door to the data room: what is on the shelf, whether it is right, and a Bundle that fits its fact table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from profcil import rooms
from profcil.data import files
from profcil.data.bundle import Bundle, Examples, Facts, File, Nodes
from profcil.errors import DataError


def status(root: Path) -> list[dict[str, Any]]:
    """One row per dataset, from file names, sizes and counts alone: nothing is decoded or hashed."""
    return [row(rooms.find("data", name), Path(root)) for name in rooms.names("data")]


def row(module: ModuleType, root: Path) -> dict[str, Any]:
    facts = module.FACTS
    found: dict[File, Path | None] = {}
    try:
        with files.readable(root):
            found = files.inventory(facts, root)
            lacking = [file.path for file, path in found.items() if path is None]
            wrong = [] if lacking else quick_faults(module, root, found)
    except DataError as error:
        lacking, wrong = [str(error)], []
    where = next((str(path.parent) for path in found.values() if path), "built in" if not facts.files else "")
    return {
        "dataset": facts.name,
        "modality": facts.modality,
        "present": not lacking,
        "complete": not (lacking or wrong),
        "where": where,
        "missing": lacking + wrong,
        "how": files.how(facts) if lacking or wrong else "",
    }


def quick_faults(module: ModuleType, root: Path, found: dict) -> list[str]:
    """Wrong sizes, and wrong counts where the dataset can count without loading."""
    wrong = [f"{path} {why}" for file, path in found.items() if (why := files.fault(file, path, checksum=False))]
    if not wrong and hasattr(module, "counts"):
        try:
            wrong = shortfalls(module.FACTS, *module.counts(root))
        except DataError as error:
            wrong = [str(error)]
    return wrong


def verify(root: Path, name: str) -> list[str]:
    """Everything that is not as the fact table says, one sentence each: files, checksums, then counts and labels."""
    root, module = Path(root), rooms.find("data", name)
    try:
        with files.readable(root):
            found = files.inventory(module.FACTS, root)
            wrong = [f"{path} {why}" for file, path in found.items() if path and (why := files.fault(file, path))]
        lacking = [str(files.missing(module.FACTS, root, file.path)) for file, path in found.items() if path is None]
        if lacking or wrong:
            return lacking + wrong
        bundle = load_bundle(name, root)
    except DataError as error:
        return [str(error)]
    return shortfalls(module.FACTS, len(bundle.train), len(bundle.test))


def load_bundle(name: str, root: Path, seed: int = 0) -> Bundle:
    """A dataset that was checked against its facts, with image statistics and a fingerprint."""
    module = rooms.find("data", name)
    with files.readable(Path(root)):
        bundle = module.load(Path(root), seed)
    check(bundle, partial=getattr(module, "PARTIAL", False))
    images = bundle.train.x.dtype == torch.uint8
    mean, std = moments(bundle.train.x) if images else ((), ())
    return replace(bundle, mean=mean, std=std, fingerprint=fingerprint(bundle))


def shortfalls(facts: Facts, train: int, test: int) -> list[str]:
    """Which parts have another size than the official ones."""
    pairs = (("training", train, facts.train), ("test", test, facts.test))
    return [
        f"{facts.title} has {got} {part} examples where the official dataset has {official}"
        for part, got, official in pairs
        if official is not None and got != official
    ]


def check(bundle: Bundle, partial: bool = False) -> None:
    """Refuse a Bundle that contradicts its fact table; a partial copy may have less of everything, never more."""
    facts = bundle.facts
    wrong = shortfalls(facts, len(bundle.train), len(bundle.test))
    less = all(got <= (official or got) for got, official in sizes(bundle))
    if wrong and not (partial and less):
        raise DataError(f"{wrong[0]}; get it again with {files.how(facts)}")
    if len(bundle.names) != facts.classes:
        raise DataError(
            f"{facts.title} names {len(bundle.names)} classes where it has {facts.classes}; {advice(facts)}"
        )
    for part, examples in named_parts(bundle):
        check_part(facts, part, examples)


def sizes(bundle: Bundle) -> list[tuple[int, int | None]]:
    return [(len(bundle.train), bundle.facts.train), (len(bundle.test), bundle.facts.test)]


def advice(facts: Facts) -> str:
    return f"compare the files with the official ones ({facts.homepage})"


def named_parts(bundle: Bundle) -> Iterator[tuple[str, Examples]]:
    for part in ("train", "validation", "test"):
        examples = getattr(bundle, part)
        if examples is not None:
            yield part, examples


def check_part(facts: Facts, part: str, examples: Examples) -> None:
    """There are examples, each has a label, and every label is a class id."""
    if len(examples) == 0:
        raise DataError(f"{facts.title}'s {part} part is empty; {advice(facts)}")
    rows = examples.nodes if isinstance(examples, Nodes) else examples.x
    if len(rows) != len(examples.y) or examples.y.dtype != torch.int64:
        raise DataError(
            f"{facts.title}'s {part} part has {len(rows)} inputs and {len(examples.y)} labels "
            f"of type {examples.y.dtype} where each input needs one int64 label; {advice(facts)}"
        )
    low, high = int(examples.y.min()), int(examples.y.max())
    if low < 0 or high >= facts.classes:
        raise DataError(
            f"{facts.title}'s {part} part has labels from {low} to {high} where 0 to {facts.classes - 1} are allowed; "
            + advice(facts)
        )


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread per channel of uint8 images scaled to [0, 1], exact, from 256 counts a channel."""
    level = torch.arange(256, dtype=torch.float64) / 255
    share = torch.stack([torch.bincount(x[:, c].reshape(-1), minlength=256) for c in range(x.shape[1])]).double()
    share /= share.sum(dim=1, keepdim=True)
    mean = share @ level
    std = (share @ level.square() - mean.square()).clamp_min(0).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def fingerprint(bundle: Bundle) -> str:
    """A hash of every label and input; a tensor that several parts share is read once."""
    state, seen = hashlib.blake2b(bundle.facts.name.encode(), digest_size=16), set()
    for part, examples in named_parts(bundle):
        for field, tensor in vars(examples).items():
            state.update(f"{part}.{field}{tuple(tensor.shape)}{tensor.dtype}".encode())
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                state.update(memoryview(tensor.contiguous().numpy()).cast("B"))
    return state.hexdigest()
