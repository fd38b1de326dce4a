"""Draws the figures of the paper from run folders, and writes the numbers behind each as JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from profcil.errors import ConfigError, unknown

# name: the function that draws it, and a description
FIGURES = {
    "heatmap": ("heatmap:draw_by_position", "accuracy of every task after every position"),
    "final": ("heatmap:draw_final", "final accuracy of every task, a row per method"),
    "accuracy": ("curves:draw_accuracy", "accuracy on the tasks met so far, over positions"),
    "cta": ("curves:draw_cta", "accuracy on the current task, over positions"),
    "explain": (
        "curves:draw_explanation",
        "accuracy, and alignment of the memory with true class means",
    ),
    "ranking": ("ranking:draw", "final accuracy of every method and seed, and which differ from the best"),
    "bytes": ("tradeoff:draw", "final accuracy against bytes sent, all methods"),
    "clients": ("clients:draw", "final accuracy of every client, and the worst one"),
    "confusion": ("confusion:draw", "predicted classes; of the CSV that `profcil eval --confusion` writes"),
    "communication": ("communication:draw", "bytes by kind and direction"),
    "snapshots": ("snapshots:draw", "stored class means in one shared PCA"),
    "embedding": ("embedding:draw", "real and replayed features, t-SNE and UMAP"),
    "mismatch": ("mismatch:draw", "replay gap and downstream drop, a panel per method"),
}


def make_figure(
    name: str, paths: Sequence[str], out: Path, formats: Sequence[str], warn: Callable[[str], None]
) -> list[Path]:
    """Draws a figure and writes it in every format, with its numbers and settings in NAME.json; the files written."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "figures need matplotlib, which is not installed; install it with `pip install 'profcil[report]'`"
        )
    from matplotlib import rc_context

    from profcil.reporting.figures.style import STYLE, save

    module, function = FIGURES[name][0].split(":")
    with rc_context(STYLE):
        draw = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        figure, numbers = draw(paths, warn)
        written = save(figure, out, name, formats)
    numbers_file = out / f"{name}.json"
    numbers_file.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [*written, numbers_file]
