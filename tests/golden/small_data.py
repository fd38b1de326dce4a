"""Small datasets of every modality for the golden runs: drawn from a fixed seed, the same on every machine."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from profcil.config import WarmupSettings
from profcil.data.bundle import Bundle, Facts, Nodes, Rows

CLASSES = 8
STREAM = {"clients": 5, "participants": 4, "task_size": 3}
TRAIN = {"rounds": 2, "epochs": 1, "batch": 16, "lr": 0.02}
NAMES = tuple(f"class {label}" for label in range(CLASSES))


def labels(each: int) -> Tensor:
    return torch.arange(CLASSES).repeat(each)


def images(each: int, seed: int, side: int) -> Rows:
    """Coloured noise around a pattern of the class."""
    y = labels(each)
    patterns = torch.rand(CLASSES, 3, side, side, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(len(y), 3, side, side, generator=torch.Generator().manual_seed(seed))
    mixed = 0.4 * patterns[y] + 0.6 * noise
    return Rows((mixed * 255).byte(), y)


def texts(each: int, seed: int) -> Rows:
    """Common words, one word of the class, and some padding."""
    y = labels(each)
    words = torch.randint(2, 40, (len(y), 9), generator=torch.Generator().manual_seed(seed))
    words[:, 3] = 40 + y
    words[::3, 6:] = 0
    return Rows(words, y)


def graph() -> tuple[Nodes, Nodes]:
    """One graph with training and test nodes; most edges join nodes of one class, most features are zero."""
    rng = torch.Generator().manual_seed(5)
    y = labels(30)
    ends = torch.randint(len(y), (2, 1500), generator=rng)
    same = y[ends[0]] == y[ends[1]]
    kept = (same | (torch.rand(1500, generator=rng) < 0.1)) & (ends[0] != ends[1])
    edges = torch.unique(torch.cat([ends[:, kept], ends[:, kept].flip(0)], 1), dim=1)
    x = (torch.rand(len(y), 200, generator=rng) < 0.01).float()
    x[torch.arange(len(y)), y] = 1.0
    train = torch.arange(len(y)) < 20 * CLASSES
    return (
        Nodes(x, edges, y[train], torch.nonzero(train).flatten()),
        Nodes(x, edges, y[~train], torch.nonzero(~train).flatten()),
    )


def facts(name: str, modality: str, encoder: str, views: tuple[str, ...]) -> Facts:
    return Facts(name, name, modality, CLASSES, None, None, views=views, encoder=encoder)


def bundle(about: Facts, train: Rows | Nodes, test: Rows | Nodes, **more: object) -> Bundle:
    digest = hashlib.blake2b(train.x.numpy().tobytes(), digest_size=8).hexdigest()
    return Bundle(about, train, test, None, NAMES, fingerprint=digest, **more)  # type: ignore[arg-type]


def image_bundle(about: Facts, each: int, side: int) -> Bundle:
    half = (0.5, 0.5, 0.5)
    return bundle(about, images(each, 1, side), images(12, 2, side), mean=half, std=half)


def text_bundle(about: Facts) -> Bundle:
    return bundle(about, texts(24, 1), texts(12, 2), vocabulary=40 + CLASSES)


def optimiser_of(train: dict[str, Any]) -> dict[str, Any]:
    """The stream's optimiser for the warm-up too. Commits where the warm-up has none of its own take it anyway."""
    own = {f.name for f in fields(WarmupSettings)}
    return {k: v for k, v in train.items() if k in own & {"lr", "optimiser"}}


def module(name: str, about: Facts, load: Callable[[], Bundle], **recipe: object) -> ModuleType:
    """A dataset module as a plug-in brings it."""
    made = ModuleType(f"golden_{name}")
    table: dict[str, Any] = {"stream": dict(STREAM), "train": dict(TRAIN), **recipe}
    table["warmup"] = {"rounds": 2, **optimiser_of(table["train"])}
    made.FACTS = about  # type: ignore[attr-defined]
    made.RECIPE = table  # type: ignore[attr-defined]
    made.load = lambda root, seed=0: load()  # type: ignore[attr-defined]
    return made


def modules() -> dict[str, ModuleType]:
    """Every dataset by name. `golden_cifar` has the shapes of CIFAR-100 and is meant for a GPU."""
    views = ("crop", "flip", "jitter")
    small = facts("golden_image", "image", "convnet", views)
    deep = facts("golden_resnet", "image", "resnet18", views)
    large = facts("golden_cifar", "image", "resnet18", views)
    words = facts("golden_text", "text", "textcnn", ("drop", "mask"))
    nodes = facts("golden_graph", "graph", "gat", ("drop", "mask"))
    group = {"model": {"norm": "group", "width": 8}}
    narrow = {"model": {"width": 16}}
    adam = {"train": {**TRAIN, "optimiser": "adam", "lr": 0.005}}
    return {
        "golden_image": module("image", small, lambda: image_bundle(small, 30, 8), **group),
        "golden_resnet": module("resnet", deep, lambda: image_bundle(deep, 20, 8), **narrow),
        "golden_cifar": module("cifar", large, lambda: image_bundle(large, 150, 32)),
        "golden_text": module("text", words, lambda: text_bundle(words), **adam),
        "golden_graph": module("graph", nodes, lambda: bundle(nodes, *graph()), **adam),
    }


def install(folder: Path) -> None:
    """Makes the datasets known to profcil as an installed plug-in does: modules and entry points in a folder."""
    about = folder / "golden-0.dist-info"
    about.mkdir(parents=True)
    lines = ["[profcil.data]"]
    for name in modules():
        source = ["from small_data import modules", f"MODULE = modules()['{name}']"]
        source += [f"{part} = MODULE.{part}" for part in ("FACTS", "RECIPE", "load")]
        (folder / f"{name}_plugin.py").write_text("\n".join(source) + "\n")
        lines.append(f"{name} = {name}_plugin")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: golden\nVersion: 0\n")
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path.insert(0, str(folder))
