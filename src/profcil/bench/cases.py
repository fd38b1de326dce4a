"""All cases of the bench by name. The module of a case is imported only when the case is run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

CLIENTS = (100, 10_000, 100_000)
CLASSES = (10, 100, 1_000)
LABEL_SPACES = (1_000, 10_000)
CHANNELS = {
    "as in the paper": {"transfer": "full"},
    "float32": {},
    "float16": {"channel.memory": "float16"},
    "int8": {"channel.memory": "int8"},
    "int8, changed rows": {"channel.memory": "int8", "channel.rows": "changed"},
    "int8, 100 nearest": {"channel.memory": "int8", "channel.nearest": 100},
}
METHODS = ("fedavg", "promax")
STEPS = ("supervised step", "plastic step", "rehearsal step", "warm-up step")
GROUPS = (1, 3, 5, 8)  # clients computed together; the steps above have ten
TEXTS_AND_GRAPHS = ("cora", "clinc150", "thucnews10")
GRAPH = "round of five clients on a graph of ogbn-arxiv's size"


@dataclass(frozen=True)
class Case:
    """The function that measures a case, and the name of the case that it is compared with, if any."""

    module: str
    call: str = "case"
    args: dict[str, Any] = field(default_factory=dict)
    base: str = ""

    def __call__(self) -> dict[str, Any]:
        module = importlib.import_module(f"profcil.bench.{self.module}")
        return getattr(module, self.call)(**self.args)


def cases(data: Path, device: str = "cpu", peer_python: str = "") -> dict[str, Case]:
    """All cases: those of a GPU first, if one is used. `peer_python` runs the other frameworks."""
    on_cpu = {**main_cases(data), **peer_cases(peer_python), **stream_cases(data), **scale_cases()}
    on_cpu |= label_space_cases(data)
    if device == "cpu":
        return on_cpu
    return {**gpu_cases(data, device), **on_cpu}


def gpu_cases(data: Path, device: str) -> dict[str, Case]:
    """Training steps, whole streams and a large graph on a GPU."""
    found = {}
    supervised = STEPS[0]
    for name in STEPS:
        args: dict[str, Any] = {"name": name, "device": device}
        found[f"{name}, {device}"] = Case("steps", args=args)
    for clients in GROUPS:
        args = {"name": supervised, "device": device, "clients": clients}
        found[f"{supervised} of {clients}, {device}"] = Case("steps", args=args)
    for method in METHODS[::-1]:
        args = {"dataset": "cifar100", "data": data, "device": device, "method": method}
        found[f"{method} on cifar100, {device}"] = Case("streams", "stream_case", args)
    found[f"{GRAPH}, {device}"] = Case("graph", args={"device": device})
    return found


def main_cases(data: Path) -> dict[str, Case]:
    """Comparisons with Flower and with the first release, a large graph and a large plan."""
    digits = {"dataset": "digits", "method": "promax", "data": data}
    many = {"clients": 100_000, "samples": 1_000_000}
    found = {}
    for setting in ("severe", "homogeneous"):
        found[f"fedavg on digits and Flower, {setting}"] = Case("flower", args={"setting": setting})
    found["promax on digits"] = Case("streams", "first_release_case", digits)
    found[GRAPH] = Case("graph")
    found["plan for 100,000 clients"] = Case("streams", "plan_case", many)
    found["own data, 100,000 texts"] = Case("own", args={"texts": 100_000})
    return found


def peer_cases(python: str) -> dict[str, Case]:
    """FedAvg on digits beside other frameworks: the stream of five tasks, and one task of all ten classes."""
    found = {}
    for name, sets in (("five tasks", ()), ("one task", ("task_size=10", "train.rounds=30"))):
        for framework in ("pfl", "flower"):
            args = {"framework": framework, "python": python, "sets": sets}
            found[f"fedavg on digits and its peers, {name}, {framework}"] = Case("peers.case", args=args)
    return found


def stream_cases(data: Path) -> dict[str, Case]:
    """Whole streams on texts, graphs and digits."""
    pairs = [*product(METHODS[::-1], TEXTS_AND_GRAPHS), ("fedavg", "digits")]
    found = {}
    for method, dataset in pairs:
        args = {"dataset": dataset, "method": method, "data": data}
        found[f"{method} on {dataset}"] = Case("streams", "stream_case", args)
    return found


def scale_cases() -> dict[str, Case]:
    """Growing numbers of clients, with ten images each, and of classes, with a hundred clients of 200 images each.

    Each case is compared with the smallest of its series. PRO-MAX rehearses a fixed number of features per class, so
    its rounds take longer with more classes.
    """
    found = {}
    for method in METHODS:
        base = ""
        for clients in CLIENTS:
            name = f"{method}, {clients:,} clients"
            args: dict[str, Any] = {"method": method, "clients": clients}
            found[name] = Case("scale", args=args, base=base)
            base = base or name
    for method in METHODS:
        base = ""
        for classes in CLASSES:
            name = f"{method}, {classes:,} classes"
            args = {"method": method, "classes": classes, "each": 200, "rounds": 1}
            found[name] = Case("scale", args=args, base=base)
            base = base or name
    return found


def label_space_cases(data: Path) -> dict[str, Case]:
    """The memory of many classes, by the settings of the channel, beside the paper's formula."""
    found = {}
    for classes, (name, settings) in product(LABEL_SPACES, CHANNELS.items()):
        args = {"data": data, "classes": classes, "settings": settings}
        found[f"memory of {classes:,} classes, {name}"] = Case("label_spaces", args=args)
    return found
