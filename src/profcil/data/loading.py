"""Status, verification and loading of datasets. A loaded dataset was checked against its fact table."""

from __future__ import annotations

import csv
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from profcil import registry
from profcil.config import OWN, OwnSettings
from profcil.data import files
from profcil.data._checks import advice, check_classes, check_facts, check_part, named_parts
from profcil.data.bundle import Bundle, Facts, File
from profcil.data.input_format import InputFormat
from profcil.errors import DataError

# What damaged files raise in any loader, if it does not name the file itself.
CONTENT_ERRORS = (UnicodeDecodeError, EOFError, zlib.error, csv.Error, RecursionError)
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel or column


def status(root: Path) -> list[dict[str, Any]]:
    """One row per dataset, from file names, sizes and counts alone: nothing is decoded or hashed."""
    broken = registry.broken_plugins("data")
    rows = [status_row(module, Path(root)) for module in registry.usable("data").values()]
    rows += [broken_row(name, why) for name, why in broken.items()]
    return sorted(rows, key=lambda row: row["dataset"])


def status_row(module: ModuleType, root: Path) -> dict[str, Any]:
    """The status of one dataset. `complete` is None for a plug-in whose facts list no files."""
    facts = module.FACTS
    if not facts.files and facts.name in registry.plugins("data"):
        return unlisted_row(facts)
    found: dict[File, Path | None] = {}
    wrong: list[str] = []
    try:
        with files.read_errors(root):
            found = files.inventory(facts, root)
            absent = [file.path for file, path in found.items() if path is None]
            if not absent:
                wrong = quick_faults(module, root, found)
    except DataError as error:
        absent = [str(error)]
    faults = absent + wrong
    row = {"dataset": facts.name, "modality": facts.modality, "present": not absent, "complete": not faults}
    how = files.how_to_get(facts) if faults else ""
    return {**row, "where": folder_of(facts, found), "missing": faults, "how": how}


def folder_of(facts: Facts, found: dict[File, Path | None]) -> str:
    """The folder of the first file that was found; "built in" for a dataset without files."""
    for path in found.values():
        if path:
            return str(path.parent)
    return "" if facts.files else "built in"


def unlisted_row(facts: Facts) -> dict[str, Any]:
    """The status of a dataset whose facts list no files."""
    note = f"its FACTS list no files; `profcil data verify {facts.name}` loads it"
    row = {"dataset": facts.name, "modality": facts.modality, "present": True, "complete": None}
    return row | {"where": "", "missing": [note], "how": files.how_to_get(facts)}


def broken_row(name: str, why: str) -> dict[str, Any]:
    """The status of a plug-in that cannot be loaded."""
    row = {"dataset": name, "modality": "", "present": False, "complete": False}
    return row | {"where": "", "missing": [why], "how": ""}


def file_faults(found: dict[File, Path | None], checksum: bool) -> list[str]:
    """One sentence for every file that exists and is not the official one."""
    faults = []
    for file, path in found.items():
        why = files.fault(file, path, checksum) if path else None
        if why:
            faults.append(f"{path} {why}")
    return faults


def quick_faults(module: ModuleType, root: Path, found: dict[File, Path | None]) -> list[str]:
    """Wrong sizes, and wrong counts if the dataset can count its examples without loading them."""
    faults = file_faults(found, checksum=False)
    if faults or not hasattr(module, "counts"):
        return faults
    try:
        return count_faults(module.FACTS, *module.counts(root))
    except DataError as error:
        return [str(error)]


def verify(root: Path, name: str) -> list[str]:
    """All faults of a dataset, one sentence each: missing files, sizes and checksums; if none, counts and labels."""
    root = Path(root)
    facts = registry.find("data", name).FACTS
    try:
        with files.read_errors(root):
            found = files.inventory(facts, root)
            wrong = file_faults(found, checksum=True)
        missing = [file.path for file, path in found.items() if path is None]
        absent = [str(files.missing(facts, root, path)) for path in missing]
        if absent or wrong:
            return absent + wrong
        bundle = load_bundle(name, root)
    except DataError as error:
        return [str(error)]
    return count_faults(facts, len(bundle.train), len(bundle.test))


def load_bundle(name: str, root: Path, seed: int = 0, own: OwnSettings | None = None) -> Bundle:
    """A dataset, checked against its facts, with statistics of images or columns and a fingerprint.

    Statistics that the loader gives are kept, and are then part of the fingerprint. `own` says how own data is read.
    """
    module = registry.find("data", name)
    load = partial(module.load, settings=own or OwnSettings()) if name == OWN else module.load
    bundle = with_input_format(call_loader(module.FACTS, load, Path(root), seed))
    is_partial = getattr(module, "PARTIAL", False)
    check_bundle(bundle, is_partial)
    if not is_partial:
        check_classes(bundle)
    content = fingerprint(bundle)
    if bundle.mean or bundle.std:
        given = f"{content}{bundle.mean}{bundle.std}"
        return replace(bundle, fingerprint=hashlib.blake2b(given.encode(), digest_size=16).hexdigest())
    mean, std = input_statistics(bundle)
    return replace(bundle, mean=mean, std=std, fingerprint=content)


def input_statistics(bundle: Bundle) -> Statistics:
    """Mean and standard deviation of the training part: per channel of images, per column of a table."""
    x = bundle.train.x
    if bundle.facts.modality == "table":
        return column_statistics(x)
    return channel_statistics(x) if x.dim() == 4 else ((), ())


def column_statistics(x: Tensor) -> Statistics:
    """Mean and standard deviation per column. A column with a single value has deviation 1."""
    wide = x.double()
    mean = wide.mean(0)
    std = wide.std(0, correction=0)
    positive = torch.where(std > 0, std, 1.0)
    return tuple(mean.tolist()), tuple(positive.tolist())


def with_input_format(bundle: Bundle) -> Bundle:
    """The dataset with the format of its inputs. That of images and graphs follows from their shape. How texts became
    token ids is known to the loader alone."""
    modality = bundle.facts.modality
    if bundle.input_format is not None or modality == "text":
        return bundle
    shape = tuple(bundle.train.x.shape[1:])
    return replace(bundle, input_format=InputFormat(modality, shape))


def call_loader(facts: Facts, load: Callable[[Path, int], Any], root: Path, seed: int) -> Bundle:
    """What a loader returns. A file that is missing or unreadable is a DataError."""
    try:
        with files.read_errors(root):
            bundle = load(root, seed)
    except OSError as error:
        what = f"{error.filename or error} ({error.strerror or type(error).__name__})"
        raise DataError(f"{facts.title} cannot be loaded from {what}; {files.how_to_repair(facts)}") from error
    except CONTENT_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{facts.title}'s files cannot be read ({reason}); {files.how_to_repair(facts)}") from error
    if not isinstance(bundle, Bundle):
        raise DataError(
            f"{facts.title}'s loader returns {type(bundle).__name__} where a Bundle is expected; correct its `load`"
        )
    return bundle


def count_faults(facts: Facts, train: int, test: int) -> list[str]:
    """One sentence for every part whose size is not the official one."""
    parts = (("training", train, facts.train), ("test", test, facts.test))
    faults = []
    for part, count, official in parts:
        if official is not None and count != official:
            faults.append(f"{facts.title} has {count} {part} examples where the official dataset has {official}")
    return faults


def check_bundle(bundle: Bundle, partial: bool = False) -> None:
    """Check a Bundle against its fact table. A partial copy may have fewer examples than the official, never more."""
    facts = bundle.facts
    faults = count_faults(facts, len(bundle.train), len(bundle.test))
    if faults and not (partial and has_no_surplus(bundle)):
        raise DataError(f"{faults[0]}; {files.how_to_repair(facts)}")
    if len(bundle.names) != facts.classes:
        raise DataError(
            f"{facts.title} names {len(bundle.names)} classes where it has {facts.classes}; {advice(facts)}"
        )
    check_facts(facts)
    for part, examples in named_parts(bundle):
        check_part(bundle, part, examples)


def has_no_surplus(bundle: Bundle) -> bool:
    """Whether no part has more examples than the official one."""
    facts = bundle.facts
    too_many_train = facts.train and len(bundle.train) > facts.train
    too_many_test = facts.test and len(bundle.test) > facts.test
    return not too_many_train and not too_many_test


def channel_statistics(x: Tensor) -> Statistics:
    """Mean and standard deviation per channel of images scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        return byte_statistics(x)
    wide = x.double()
    mean = wide.mean((0, 2, 3))
    std = wide.std((0, 2, 3), correction=0)
    return tuple(mean.tolist()), tuple(std.tolist())


def byte_statistics(x: Tensor) -> Statistics:
    """The same for uint8 images: exact, from one histogram of 256 bins per channel."""
    level = torch.arange(256, dtype=torch.float64) / 255
    histograms = []
    for channel in range(x.shape[1]):
        pixels = x[:, channel].reshape(-1)
        histograms.append(torch.bincount(pixels, minlength=256))
    share = torch.stack(histograms).double()
    share /= share.sum(dim=1, keepdim=True)
    mean = share @ level
    variance = share @ level.square() - mean.square()
    std = variance.clamp_min(0).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def fingerprint(bundle: Bundle) -> str:
    """A hash of all labels and inputs. A tensor that several parts share is hashed once."""
    total = hashlib.blake2b(bundle.facts.name.encode(), digest_size=16)
    hashed = set()
    for part, examples in named_parts(bundle):
        for field, tensor in vars(examples).items():
            total.update(f"{part}.{field}{tuple(tensor.shape)}{tensor.dtype}".encode())
            if tensor.numel() and tensor.data_ptr() not in hashed:  # an empty tensor has no bytes to cast
                hashed.add(tensor.data_ptr())
                total.update(memoryview(tensor.contiguous().numpy()).cast("B"))
    return total.hexdigest()
