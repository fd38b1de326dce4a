"""Computes the turns of a round in this process.

With `accelerate = "off"` this is the reference: one turn after another, every phase by `steps.run`. Otherwise all turns
advance together, and the phases they ask for are run by the package `accel`. This is the only module that imports it;
without that package everything runs by the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.engine import steps
from profcil.engine.channel import Reply, When
from profcil.engine.phases import Train, Trained, Turn
from profcil.errors import Diverged
from profcil.model.net import Net
from profcil.privacy.gradients import train_privately

if TYPE_CHECKING:
    from profcil.accel.acceleration import Acceleration

Guard = Callable[[Train, Trained], bool]  # whether a phase's result is usable; it may raise an error instead
Step = Callable[[], None]


class Executor:
    """Computes the turns of all rounds of a run."""

    def __init__(self, net: Net, accelerate: str = "auto", workers: int = 1, precision: str = "auto") -> None:
        self.net = net
        net.set_precision(precision)
        self.acceleration = make_acceleration(net, workers) if accelerate == "auto" else None

    def __call__(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """The replies of all turns. A turn with a phase that the guard refuses has no reply."""
        if self.acceleration is not None:
            return self.advance_together(turns, guard)
        replies: dict[int, Reply] = {}
        for client, turn in turns.items():
            replies |= self.advance_together({client: turn}, guard)
        return replies

    def advance_together(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """Computes turns phase by phase. Losses that are still on a GPU are read back once, after the last phase,
        because reading a value synchronises the GPU."""
        replies: dict[int, Reply] = {}
        unread: list[tuple[Train, Trained]] = []
        waiting = advance(turns, dict.fromkeys(turns), replies)
        while waiting:
            results = self.run(list(waiting.values()))
            late: dict[int, Trained | None] = {}  # checked by the guard when their losses are read back
            usable: dict[int, Trained | None] = {}
            for phase in waiting.values():
                result = results[phase.client]
                if isinstance(result.loss, Tensor):
                    late[phase.client] = result
                    unread.append((phase, result))
                elif guard(phase, result):
                    usable[phase.client] = result
            try:
                waiting = advance(turns, late | usable, replies)
            except Exception:
                read_back({}, unread, guard)  # if a NaN in an unread result is the cause, the guard reports it
                raise
        return read_back(replies, unread, guard)

    def run(self, phases: Sequence[Train]) -> dict[int, Trained]:
        """The result of every phase, by client."""
        if self.acceleration is not None:
            return self.acceleration.run(phases)
        return {phase.client: self.run_one(phase) for phase in phases}

    def run_one(self, phase: Train) -> Trained:
        """The result of a phase by the reference path."""
        return train_privately(self.net, phase) if phase.noise else steps.run(self.net, phase)

    def repeated(self, step: Step) -> Step:
        """A faster version of a server's step that is called many times and always uses the same tensors."""
        return self.acceleration.repeated(step) if self.acceleration is not None else step

    def clear_caches(self) -> None:
        """Frees the memory of recorded steps before a stage with other steps begins."""
        if self.acceleration is not None:
            self.acceleration.clear_caches()

    def report(self) -> dict[str, Any]:
        """Which code computed the results, for run.json."""
        facts: dict[str, Any] = {"path": "accelerated" if self.acceleration is not None else "reference"}
        facts |= {"device": self.net.device.type, "precision": "bf16" if self.net.bf16 else "float32"}
        return facts | (self.acceleration.report() if self.acceleration is not None else {})


def read_back(replies: Mapping[int, Reply], unread: Sequence[tuple[Train, Trained]], guard: Guard) -> dict[int, Reply]:
    """The replies of the clients whose phases are all usable, with numbers instead of tensors in their notes. All
    losses and largest values on a GPU are read back in one copy. A loss in a reply's notes is one of these tensors."""
    tensors: list[Any] = []
    for _, result in unread:
        tensors += [result.loss, result.max_abs]
    values = read_values(tensors)
    failed = set()
    for phase, result in unread:
        known = replace(result, loss=values[id(result.loss)], max_abs=values[id(result.max_abs)])
        if not guard(phase, known):
            failed.add(phase.client)
    kept = {}
    for client, reply in replies.items():
        if client not in failed:
            notes = {}
            for name, note in reply.notes.items():
                number = values.get(id(note), note)
                notes[name] = float(number)
            kept[client] = replace(reply, notes=notes)
    return kept


def read_values(tensors: Sequence[Any]) -> dict[int, float]:
    """The values of scalar tensors by the `id` of the tensor, read in one copy."""
    if not tensors:
        return {}
    stacked = torch.stack(list(tensors))
    return dict(zip(map(id, tensors), stacked.tolist(), strict=True))


def advance(
    turns: Mapping[int, Turn], results: Mapping[int, Trained | None], replies: dict[int, Reply]
) -> dict[int, Train]:
    """Sends each turn its result and returns the phases that the turns yield next. The replies of finished turns are
    added to `replies`."""
    phases: dict[int, Train] = {}
    for client, result in results.items():
        try:
            phases[client] = turns[client].send(result)  # type: ignore[arg-type]
        except StopIteration as end:
            replies[client] = end.value
    return phases


def make_guard(settings: TrainSettings, when: When) -> Guard:
    """A check of each phase's result, so that no diverged client is averaged. By `train.on_divergence` the run ends
    with an error that names the client, or continues without it."""

    def guard(phase: Train, result: Trained) -> bool:
        loss = float(result.loss)
        if is_finite(phase, result) and abs(loss) <= settings.loss_limit:
            return True
        if settings.on_divergence == "skip-client":
            return False
        about = phase.name if phase.noise else f"{phase.name}, loss {loss:.3g}"  # with noise no loss is computed
        place = f"position {when.position + 1}, {when.stage} {when.round + 1}"
        raise Diverged(
            f"client {phase.client} diverged at {place} ({about}); "
            "lower train.lr, tighten train.clip, or set train.on_divergence=skip-client"
        )

    return guard


def is_finite(phase: Train, result: Trained) -> bool:
    """Whether the trained parameters of a phase have no NaN and no infinity."""
    if result.max_abs is not None:
        return math.isfinite(result.max_abs)
    tensors = [t for block in phase.blocks for t in result.weights[block].values()]
    return finite([t for t in tensors if t.numel()])


def finite(tensors: list[Tensor]) -> bool:
    """Whether no value is NaN or infinite. Norms (on a GPU) and extremes (on a CPU) are fast and propagate NaN."""
    if tensors[0].is_cuda:
        extremes = list(torch._foreach_norm(tensors, torch.inf))
    else:
        extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return bool(torch.isfinite(torch.stack(extremes)).all())


# -- the package accel ------------------------------------------------------------------------------------------------


def make_acceleration(net: Net, workers: int) -> Acceleration | None:
    """The accelerated path; None where the package `accel` is absent."""
    try:
        from profcil.accel.acceleration import Acceleration
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("profcil.accel"):
            raise
        return None
    return Acceleration(net, workers)


def planned_report(accelerate: str, device: str) -> dict[str, Any]:
    """The part of `Executor.report` that is known before there is a model: path, device, and compiler or Triton."""
    reference = {"path": "reference", "device": device}
    if accelerate != "auto":
        return reference
    try:
        from profcil.accel import loader
    except ModuleNotFoundError:
        return reference
    used = {"triton": loader.triton_version()} if device == "cuda" else {"compiler": loader.compiler_version()}
    return {"path": "accelerated", "device": device} | used


def prepare(device: str) -> None:
    """Starts loading or compiling kernels in the background, while the data is read."""
    try:
        from profcil.accel import loader
    except ModuleNotFoundError:
        return
    loader.prepare(device)


def examine_machine() -> dict[str, Any]:
    """What the accelerated path can use on this machine, and the results of its self-checks. Empty without `accel`."""
    try:
        from profcil.accel import acceleration
    except ModuleNotFoundError:
        return {}
    return acceleration.examine_machine()
