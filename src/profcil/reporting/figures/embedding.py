"""Real against replayed features in the plane, by t-SNE and UMAP: a qualitative view, its settings kept beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import RunFolderError
from profcil.randomness import generator, number
from profcil.reporting.figures import inputs, style
from profcil.runs.gather import find_run_folders
from profcil.runs.reader import load_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 1000  # features drawn of each sort
CLASSES = len(style.COLOURS)
TSNE: dict[str, Any] = {"perplexity": 30.0, "init": "pca", "learning_rate": "auto", "max_iter": 1000}
UMAP: dict[str, Any] = {"n_neighbors": 15, "min_dist": 0.1, "metric": "euclidean", "init": "pca"}


def embedding(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A row per run, a panel per technique; both kinds of features are laid out together."""
    found = readable(find_run_folders(paths), tell)
    techniques = {"t-SNE": tsne, "UMAP": umap}
    if find_spec("umap") is None:
        tell("UMAP is left out, umap-learn is not installed; `pip install 'profcil[report]'` brings it")
        techniques.pop("UMAP")
    figure, axes = style.panels(len(found) * len(techniques), len(techniques), style.PAGE * 0.8, 2.5)
    classes = np.unique(np.concatenate([data[k] for data, _ in found.values() for k in ("real_label", "replay_label")]))
    facts: dict[str, Any] = {}
    free = iter(axes)
    for name, (data, about) in found.items():
        facts[name] = about | {"real": len(data["real"]), "replay": len(data["replay"])}
        for technique, layout in techniques.items():
            points, facts[name][technique] = layout(np.concatenate([data["real"], data["replay"]]))
            panel(ax := next(free), points, data, classes)
            ax.set_title(f"{about['method']}: {technique}")
    spaces = dict.fromkeys(about["space"] for _, about in found.values())
    style.legend_below(figure, axes, style.folded(f"features: {'; '.join(spaces)}", 90), columns=9)
    return figure, facts


def readable(runs: Sequence[Path], tell: Callable[[str], None]) -> dict[str, tuple[dict[str, np.ndarray], dict]]:
    """By run, its features and what is known about them; of several runs, those without any are named."""
    found = {}
    for run in runs:
        try:
            data, about = inputs.replay(run)
        except RunFolderError as error:
            if len(runs) == 1:
                raise
            tell(f"left out: {error}")
            continue
        name = run.name if run.name not in found else str(run)
        found[name] = thinned(weak_only(data, run)), about
    if not found:
        raise RunFolderError(f"none of the {len(runs)} runs given has a replay.npz; `profcil diagnose RUN` writes it")
    return found


def weak_only(data: dict[str, np.ndarray], run: Path) -> dict[str, np.ndarray]:
    """Of a run with a weakened task, that task's classes, as in the paper; of any other run, everything."""
    about = load_run(run) if (run / "config.toml").is_file() else None
    weak = about.config["stream"].get("weak_task", -1) if about else -1
    if about is None or weak < 0:
        return data
    kept = {name: np.isin(data[f"{name}_label"], about.plan.tasks[weak]) for name in ("real", "replay")}
    out = {f"{name}{end}": data[f"{name}{end}"][kept[name]] for name in kept for end in ("", "_label")}
    if not all(len(values) for values in out.values()):
        raise RunFolderError(f"{run}/replay.npz has no replay of the weak task; its method does not replay that task")
    return out


def thinned(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """At most MOST features of each sort, drawn the same way every time."""
    out: dict[str, np.ndarray] = {}
    for name in ("real", "replay"):
        n = len(data[name])
        kept = np.sort(generator(0, "figure", "embedding", name).permutation(n)[:MOST])
        out |= {name: data[name][kept], f"{name}_label": data[f"{name}_label"][kept]}
    return out


def tsne(features: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """t-SNE by scikit-learn; the perplexity shrinks where there are few points, and says so in its settings."""
    from sklearn.manifold import TSNE as Layout

    perplexity = min(TSNE["perplexity"], max(1.0, (len(features) - 1) / 3))
    settings = TSNE | {"perplexity": perplexity, "random_state": seed("t-SNE")}
    if min(features.shape) < 2:
        settings["init"] = "random"
    return Layout(**settings).fit_transform(features.astype(np.float32)), settings


def umap(features: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """UMAP by umap-learn, on one core so that it can be repeated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from umap import UMAP as Layout

        settings = UMAP | {"n_neighbors": min(UMAP["n_neighbors"], len(features) - 1), "n_jobs": 1}
        settings["random_state"] = seed("UMAP")
        if min(features.shape) <= 2:
            settings["init"] = "random"
        return Layout(**settings).fit_transform(features.astype(np.float32)), settings


def seed(name: str) -> int:
    return number(0, "figure", "embedding", name) % 2**31  # both libraries take 32 bits


def panel(ax: Axes, points: np.ndarray, data: dict[str, np.ndarray], classes: np.ndarray) -> None:
    """Real features as pale discs, replayed ones as crosses; a colour per class where few enough to tell apart."""
    labels = np.concatenate([data["real_label"], data["replay_label"]])
    real = np.arange(len(points)) < len(data["real"])
    few = len(classes) <= CLASSES
    for i, label in enumerate(classes):
        pale, full = (style.COLOURS[i], style.COLOURS[i]) if few else ("#777777", style.COLOURS[1])
        style.dots(ax, points[real & (labels == label)], s=12, color=pale, alpha=0.3, linewidths=0)
        style.dots(ax, points[~real & (labels == label)], s=9, marker="x", color=full, linewidths=0.6)
    key(ax, classes)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#BBBBBB")


def key(ax: Axes, classes: np.ndarray) -> None:
    """Entries for the legend: what the marks mean, then the classes."""
    few = len(classes) <= CLASSES
    ax.scatter([], [], s=20, color="#444444", alpha=0.3, linewidths=0, label="real")
    ax.scatter([], [], s=16, marker="x", color="#444444" if few else style.COLOURS[1], linewidths=0.8, label="replay")
    for i, label in enumerate(classes if few else []):
        ax.scatter([], [], s=14, color=style.COLOURS[i], label=f"class {label}")
