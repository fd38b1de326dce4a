"""The paper's figures from run folders: one function each, the numbers behind a picture beside it as JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from profcil.errors import ConfigError, unknown

# name: where it is drawn, and what it shows
FIGURES = {
    "heatmap": ("heatmap:by_position", "accuracy of every task after every position"),
    "final": ("heatmap:final", "final accuracy of every task, a row per method"),
    "accuracy": ("curves:accuracy", "accuracy on the tasks met so far, over positions"),
    "cta": ("curves:cta", "accuracy on the current task, over positions"),
    "explain": ("curves:explain", "accuracy, and whether the memory still points at the truth, over positions"),
    "communication": ("communication:communication", "bytes by kind and direction"),
    "snapshots": ("snapshots:snapshots", "remembered class means in one shared PCA"),
    "embedding": ("embedding:embedding", "real against replayed features, t-SNE and UMAP"),
    "mismatch": ("mismatch:mismatch", "replay gap against downstream drop, a panel per method"),
}


def make(name: str, paths: Sequence[str], out: Path, formats: Sequence[str], tell: Callable[[str], None]) -> list[Path]:
    """Draws a figure and writes it in every format, with its numbers and settings in NAME.json."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib, which is not installed; `pip install 'profcil[report]'` brings it")
    from matplotlib import rc_context

    from profcil.reporting.figures.style import STYLE, save

    module, function = FIGURES[name][0].split(":")
    with rc_context(STYLE):
        draw = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        figure, numbers = draw(paths, tell)
        made = save(figure, out, name, formats)
    beside = out / f"{name}.json"
    beside.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [*made, beside]
