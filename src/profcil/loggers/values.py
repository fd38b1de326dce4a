"""The values of one message of a run, by names that every logger uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profcil.engine.recorder import Progress

STAGES = {"warmup": "warmup", "dictionary": "dictionary", "round": "stream"}  # as the engine names them


def round_values(progress: Progress) -> dict[str, float]:
    """Loss, number of clients and the notes of a round, e.g. the seconds of the server."""
    stage = STAGES[progress.when.stage]
    return {f"{stage}/{name}": float(value) for name, value in progress.facts.items() if is_number(value)}


def position_values(progress: Progress, folder: Path) -> dict[str, float]:
    """FAA, CTA, AF and bytes so far, accuracy by task and class, and the alignment of the memory."""
    values = {f"results/{name}": float(value) for name, value in progress.so_far.items()}
    values |= task_accuracy(progress.facts["correct"], folder)
    for number, percent in enumerate(progress.facts["classes"]):
        if percent is not None:
            values[f"classes/{number}"] = percent
    return values | dict(alignments(progress.facts["alignment"]))


def task_accuracy(correct: list[int], folder: Path) -> dict[str, float]:
    """Accuracy in percent by task, counted from 1. The run folder has the number of examples."""
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    values = {}
    for number, (right, total) in enumerate(zip(correct, scores["total"], strict=True), start=1):
        if right >= 0 and total:
            values[f"tasks/{number}"] = 100 * right / total
    return values


def alignments(spaces: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for space, found in spaces.items():
        for name, value in found.items():
            if is_number(value) and name != "classes":
                yield f"alignment/{space}/{name}", float(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
