"""The door to the data room: what is on the shelf, whether it is right, and a Bundle that fits its fact table."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from profcil import registry
from profcil.data import files
from profcil.data._checks import advice, check_classes, check_facts, check_part, named_parts
from profcil.data.bundle import Bundle, Facts, File
from profcil.errors import DataError


def status(root: Path) -> list[dict[str, Any]]:
    """One row per dataset, from file names, sizes and counts alone: nothing is decoded or hashed."""
    lame = registry.broken("data")
    rows = [row(module, Path(root)) for module in registry.usable("data").values()]
    return sorted(rows + [broken_row(name, why) for name, why in lame.items()], key=lambda r: r["dataset"])


def row(module: ModuleType, root: Path) -> dict[str, Any]:
    """Whether a dataset is complete is not known (None) where another package's lists no files to look for."""
    facts = module.FACTS
    if not facts.files and facts.name in registry.guests("data"):
        return unlisted_row(facts)
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


def unlisted_row(facts: Facts) -> dict[str, Any]:
    said = f"its FACTS list no files; `profcil data verify {facts.name}` loads it"
    about = {"dataset": facts.name, "modality": facts.modality, "present": True, "complete": None}
    return about | {"where": "", "missing": [said], "how": files.how(facts)}


def broken_row(name: str, why: str) -> dict[str, Any]:
    about = {"dataset": name, "modality": "", "present": False, "complete": False}
    return about | {"where": "", "missing": [why], "how": ""}


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
    root, module = Path(root), registry.find("data", name)
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
    """A dataset that was checked against its facts, with image statistics and a fingerprint. A loader's own statistics
    are kept, and are then part of the fingerprint."""
    module = registry.find("data", name)
    bundle, partial = read(module, Path(root), seed), getattr(module, "PARTIAL", False)
    check(bundle, partial)
    if not partial:
        check_classes(bundle)
    made = fingerprint(bundle)
    if bundle.mean or bundle.std:
        own = f"{made}{bundle.mean}{bundle.std}"
        return replace(bundle, fingerprint=hashlib.blake2b(own.encode(), digest_size=16).hexdigest())
    mean, std = moments(bundle.train.x) if bundle.train.x.dim() == 4 else ((), ())
    return replace(bundle, mean=mean, std=std, fingerprint=made)


def read(module: ModuleType, root: Path, seed: int) -> Bundle:
    """What the loader gives; a file it does not find, or may not read, is told in one sentence."""
    facts = module.FACTS
    try:
        with files.readable(root):
            bundle = module.load(root, seed)
    except OSError as error:
        what = f"{error.filename or error} ({error.strerror or type(error).__name__})"
        raise DataError(f"{facts.title} cannot be loaded from {what}; {files.again(facts)}") from error
    if not isinstance(bundle, Bundle):
        raise DataError(f"{facts.title}'s loader gives {type(bundle).__name__} where a Bundle is expected")
    return bundle


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
        raise DataError(f"{wrong[0]}; {files.again(facts)}")
    if len(bundle.names) != facts.classes:
        raise DataError(
            f"{facts.title} names {len(bundle.names)} classes where it has {facts.classes}; {advice(facts)}"
        )
    check_facts(facts)
    for part, examples in named_parts(bundle):
        check_part(bundle, part, examples)


def sizes(bundle: Bundle) -> list[tuple[int, int | None]]:
    return [(len(bundle.train), bundle.facts.train), (len(bundle.test), bundle.facts.test)]


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread per channel of images scaled to [0, 1]; of bytes exact, from 256 counts a channel."""
    if x.dtype != torch.uint8:
        wide = x.double()
        return tuple(wide.mean((0, 2, 3)).tolist()), tuple(wide.std((0, 2, 3), correction=0).tolist())
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
