"""Every case of the bench by its name. Nothing is imported before a case is played."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENTS, CLASSES, METHODS = (100, 10_000, 100_000), (10, 100, 1_000), ("fedavg", "promax")
STEPS = ("supervised step", "plastic step", "rehearsal step", "warm-up step")
GROUPS = (1, 3, 5, 8)  # clients side by side; the steps above have ten
TEXTS_AND_GRAPHS = ("cora", "clinc150", "thucnews10")
GRAPH = "round of five clients on a graph of ogbn-arxiv's size"


@dataclass(frozen=True)
class Case:
    """What is called to measure it, and the case it is compared with where it has no reference of its own."""

    module: str
    call: str = "case"
    args: dict[str, Any] = field(default_factory=dict)
    base: str = ""

    def __call__(self) -> dict[str, Any]:
        return getattr(importlib.import_module(f"profcil.bench.{self.module}"), self.call)(**self.args)


def cases(data: Path, device: str = "cpu") -> dict[str, Case]:
    """The part for a GPU where one is used, then the CPU's."""
    gpu = on_gpu(data, device) if device != "cpu" else {}
    return {**gpu, **first_promises(data), **streams(data), **scales()}


def on_gpu(data: Path, device: str) -> dict[str, Case]:
    whole = {"dataset": "cifar100", "data": data, "device": device}
    few = {f"{STEPS[0]} of {n}, {device}": {"name": STEPS[0], "device": device, "clients": n} for n in GROUPS}
    return {
        **{f"{name}, {device}": Case("steps", args={"name": name, "device": device}) for name in STEPS},
        **{name: Case("steps", args=args) for name, args in few.items()},
        **{f"{m} on cifar100, {device}": Case("streams", "stream_case", {**whole, "method": m}) for m in METHODS[::-1]},
        f"{GRAPH}, {device}": Case("graph", args={"device": device}),
    }


def first_promises(data: Path) -> dict[str, Case]:
    digits = {"dataset": "digits", "method": "promax", "data": data}
    return {
        "fedavg on digits and Flower, severe": Case("flower", args={"setting": "severe"}),
        "fedavg on digits and Flower, homogeneous": Case("flower", args={"setting": "homogeneous"}),
        "promax on digits": Case("streams", "first_release_case", digits),
        GRAPH: Case("graph"),
        "plan for 100,000 clients": Case("streams", "plan_case", {"clients": 100_000, "samples": 1_000_000}),
    }


def streams(data: Path) -> dict[str, Case]:
    found = [(m, d) for m in METHODS[::-1] for d in TEXTS_AND_GRAPHS] + [("fedavg", "digits")]
    return {f"{m} on {d}": Case("streams", "stream_case", {"dataset": d, "method": m, "data": data}) for m, d in found}


def scales() -> dict[str, Case]:
    """As the federation grows, every client has ten images; as the classes grow, a hundred clients have 200 each.
    PRO-MAX rehearses so many features of every class, so with them its rounds must grow."""
    few, least = f"{CLIENTS[0]:,} clients", f"{CLASSES[0]:,} classes"
    grown = {f"{m}, {n:,} clients": ({"method": m, "clients": n}, f"{m}, {few}") for m in METHODS for n in CLIENTS}
    grown |= {
        f"{m}, {n:,} classes": ({"method": m, "classes": n, "each": 200, "rounds": 1}, f"{m}, {least}")
        for m in METHODS
        for n in CLASSES
    }
    return {name: Case("scale", args=args, base=base if base != name else "") for name, (args, base) in grown.items()}
