"""Runs of a second or less, ways to end them, and what must be the same afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from profcil.contract.case import without_recipe
from profcil.engine import recorder, run
from profcil.engine.channel import Block, Inbox, ServerState
from profcil.engine.client import Client
from profcil.engine.phases import Turn
from profcil.io.atomic_files import read_tensors
from profcil.methods import fedavg
from profcil.methods.base import Method
from profcil.resolve import RunConfig, resolve
from profcil.runs.folder import RunFolder

TINY = {
    "stream.clients": 4,
    "stream.participants": 2,
    "stream.task_size": 3,  # three positions
    "stream.support": 0.5,
    "train.rounds": 2,
    "train.epochs": 1,
    "train.batch": 64,
    "warmup.rounds": 1,
    "threads": 1,
    "workers": 1,
}


def tiny(method: str = "fedavg", **more: Any) -> RunConfig:
    """A configuration; `a__b=1` sets a.b."""
    spaces = ("fit_space", "rehearse_space") if method in ("pro", "promax") else ("label_space",)
    seen = {f"params.{name}": "seen" for name in spaces}
    plain = without_recipe(method, "digits") if method == "prolin" else {}  # its chosen settings have no moving base
    sets = TINY | seen | plain | {k.replace("__", "."): v for k, v in more.items()}
    return resolve(flags={"dataset": "digits", "method": method}, sets=[f"{k}={v}" for k, v in sets.items()])


class TracingMethod(Method):
    """FedAvg whose model depends on everything that a state holds: if any of it is lost, or a part of a round is
    counted twice, the weights differ."""

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        turns = client.private["turns"] if client.private else torch.zeros(1)
        reply = yield from super().turn(client, inbox)
        head = {k: v * (1 + 0.01 * turns) for k, v in reply.blocks["head"].tensors.items()}
        return replace(reply, blocks={**reply.blocks, "head": Block("model", head)}, private={"turns": turns + 1})

    def end_position(self, state: ServerState, when: Any) -> ServerState:
        head = {k: v * 1.01 for k, v in state.blocks["head"].tensors.items()}
        return state.put(head=Block("model", head))


def outcome(folder: Path) -> dict[str, Any]:
    """The result of a run, to the bit; without times and machines."""
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    about = json.loads((folder / "run.json").read_text())
    return {
        "scores": (folder / "scores.json").read_bytes(),
        "ledger": (folder / "ledger.csv").read_bytes(),
        "tensors": {k: t.numpy().tobytes() for k, t in found[0].items()},
        "events": events(folder),
        "run": {k: about[k] for k in ("done", "bytes", "metrics", "plan", "position", "server_memory_bytes")},
    }


def events(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "resident_mb")} for line in lines]


def at_call(spot: str, number: int, do: Callable[..., None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Calls a function just before the n-th call of `module:name` or `module:Class.name`."""
    module, _, name = spot.partition(":")
    owner, calls = import_module(module), 0
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    original = getattr(owner, name.split(".")[-1])

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            do(*args)
        return original(*args, **more)

    patch(owner, name.split(".")[-1], counted)


def sigkill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigkill_in_mid_line(folder: RunFolder, line: str) -> None:
    with open(folder.path / "events.jsonl", "a") as file:
        file.write(line[: len(line) // 2])
    sigkill()


def sigkill_in_mid_file(part: str, path: Path) -> None:
    """In place of a rename: cuts the partial file, as a crash in the middle of writing does."""
    os.truncate(part, os.path.getsize(part) // 2)
    sigkill()


def in_child(target: Callable[..., None], *args: Any) -> multiprocessing.Process:
    """Starts a fresh process cheaply: forked from a server that has imported torch but never used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["profcil.engine.run", "sklearn.datasets"])
    child = context.Process(target=target, args=args, daemon=True)
    child.start()
    return child


TRAIN = "profcil.engine.steps:run"  # called for every client of every round where acceleration is off


def path_of(spot: str) -> str:
    """The setting `accelerate` of a run that ends at a call of this function: `off` for spots that the accelerated path
    calls in another number, as it renames compiled kernels too."""
    return "off" if spot in (TRAIN, "os:replace") else "auto"


def killed_run(out: Path, cache: Path, spot: str, number: int, do: Callable[..., None]) -> None:
    """A run that is killed at a call, saving after every round until then."""
    os.environ["PROFCIL_CACHE"] = str(cache)
    recorder.SAVE_SECONDS, fedavg.METHOD = -1, TracingMethod
    at_call(spot, number, do)
    run.start(tiny(accelerate=path_of(spot)), out, out)


def holding(out: Path, ready: Any) -> None:
    """Opens a folder and keeps it open."""
    with RunFolder(out):
        ready.set()
        signal.pause()
