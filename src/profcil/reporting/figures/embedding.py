"""Real and replayed features in the plane, by t-SNE and UMAP: a qualitative view. NAME.json records the settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import RunFolderError
from profcil.randomness import derive_seed, generator
from profcil.reporting.figures import inputs, style
from profcil.reporting.paper import method_title
from profcil.runs.gather import find_run_folders
from profcil.runs.reader import load_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_FEATURES = 1000  # real, and as many replayed ones
MAX_CLASSES = len(style.COLOURS)  # with more classes than this, colours do not distinguish them
TSNE: dict[str, Any] = {"perplexity": 30.0, "init": "pca", "learning_rate": "auto", "max_iter": 1000}
UMAP: dict[str, Any] = {"n_neighbors": 15, "min_dist": 0.1, "metric": "euclidean", "init": "pca"}
FeatureArrays = dict[str, np.ndarray]  # real, real_label, replay, replay_label


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A row per run and a panel per technique. Real and replayed features are embedded together."""
    folders = find_run_folders(paths)
    features_by_run = load_features(folders, warn)
    techniques = {"t-SNE": tsne, "UMAP": umap}
    if find_spec("umap") is None:
        warn("UMAP is left out, umap-learn is not installed; install it with `pip install 'profcil[report]'`")
        techniques.pop("UMAP")
    columns = len(techniques)
    figure, axes = style.panels(len(features_by_run) * columns, columns, style.PAGE * 0.8, 2.5)
    labels = []
    for data, _ in features_by_run.values():
        labels += [data["real_label"], data["replay_label"]]
    classes = np.unique(np.concatenate(labels))
    facts: dict[str, Any] = {}
    remaining_axes = iter(axes)
    for name, (data, about) in features_by_run.items():
        facts[name] = about | {"real": len(data["real"]), "replay": len(data["replay"])}
        for technique, embed in techniques.items():
            features = np.concatenate([data["real"], data["replay"]])
            points, settings = embed(features)
            facts[name][technique] = settings
            ax = next(remaining_axes)
            draw_panel(ax, points, data, classes)
            ax.set_title(f"{method_title(about['method'])}: {technique}")
    spaces = dict.fromkeys(about["space"] for _, about in features_by_run.values())
    legend_title = style.folded(f"features: {'; '.join(spaces)}", 90)
    style.legend_below(figure, axes, legend_title, columns=9)
    return figure, facts


def load_features(runs: Sequence[Path], warn: Callable[[str], None]) -> dict[str, tuple[FeatureArrays, dict[str, Any]]]:
    """By run, its features and facts about them. Runs without features are left out with a warning."""
    features_by_run: dict[str, tuple[FeatureArrays, dict[str, Any]]] = {}
    for run in runs:
        try:
            data, about = inputs.read_replay(run)
        except RunFolderError as error:
            if len(runs) == 1:
                raise
            warn(f"left out: {error}")
            continue
        name = run.name if run.name not in features_by_run else str(run)
        features_by_run[name] = thin_out(select_weak_task(data, run)), about
    if not features_by_run:
        raise RunFolderError(f"none of the {len(runs)} runs given has a replay.npz; `profcil diagnose RUN` writes it")
    return features_by_run


def select_weak_task(data: FeatureArrays, run: Path) -> FeatureArrays:
    """The classes of the weak task, as in the paper; all classes if the run has no weak task."""
    about = load_run(run) if (run / "config.toml").is_file() else None
    weak_task = about.config["stream"].get("weak_task", -1) if about else -1
    if about is None or weak_task < 0:
        return data
    selected: FeatureArrays = {}
    for name in ("real", "replay"):
        chosen = np.isin(data[f"{name}_label"], about.plan.tasks[weak_task])
        selected[name] = data[name][chosen]
        selected[f"{name}_label"] = data[f"{name}_label"][chosen]
    if not all(len(values) for values in selected.values()):
        raise RunFolderError(f"{run}/replay.npz has no replay of the weak task; its method does not replay that task")
    return selected


def thin_out(data: FeatureArrays) -> FeatureArrays:
    """At most MAX_FEATURES real and replayed features, drawn with a fixed seed."""
    thinned: FeatureArrays = {}
    for name in ("real", "replay"):
        order = generator(0, "figure", "embedding", name).permutation(len(data[name]))
        chosen = np.sort(order[:MAX_FEATURES])
        thinned[name] = data[name][chosen]
        thinned[f"{name}_label"] = data[f"{name}_label"][chosen]
    return thinned


def tsne(features: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """t-SNE by scikit-learn, and its settings; the perplexity is smaller if there are few points."""
    from sklearn.manifold import TSNE as Layout

    largest = max(1.0, (len(features) - 1) / 3)
    perplexity = min(TSNE["perplexity"], largest)
    settings = TSNE | {"perplexity": perplexity, "random_state": fixed_seed("t-SNE")}
    if min(features.shape) < 2:
        settings["init"] = "random"
    return Layout(**settings).fit_transform(features.astype(np.float32)), settings


def umap(features: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """UMAP by umap-learn, and its settings; on one core, because only that is reproducible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from umap import UMAP as Layout

        neighbours = min(UMAP["n_neighbors"], len(features) - 1)
        settings = UMAP | {"n_neighbors": neighbours, "n_jobs": 1}
        settings["random_state"] = fixed_seed("UMAP")
        if min(features.shape) <= 2:
            settings["init"] = "random"
        return Layout(**settings).fit_transform(features.astype(np.float32)), settings


def fixed_seed(name: str) -> int:
    return derive_seed(0, "figure", "embedding", name) % 2**31  # both libraries take 32-bit seeds


def draw_panel(ax: Axes, points: np.ndarray, data: FeatureArrays, classes: np.ndarray) -> None:
    """Real features as pale discs, replayed ones as crosses, with a colour per class if there are few classes."""
    labels = np.concatenate([data["real_label"], data["replay_label"]])
    is_real = np.arange(len(points)) < len(data["real"])
    for i, label in enumerate(classes):
        real_colour = replay_colour = style.COLOURS[i % len(style.COLOURS)]
        if len(classes) > MAX_CLASSES:
            real_colour = "#777777"
            replay_colour = style.COLOURS[1]
        of_class = labels == label
        real = points[is_real & of_class]
        replay = points[~is_real & of_class]
        style.dots(ax, real, s=12, color=real_colour, alpha=0.3, linewidths=0)
        style.dots(ax, replay, s=9, marker="x", color=replay_colour, linewidths=0.6)
    add_legend_entries(ax, classes)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#BBBBBB")


def add_legend_entries(ax: Axes, classes: np.ndarray) -> None:
    """Legend entries for the marks, and for the classes if there are few."""
    few = len(classes) <= MAX_CLASSES
    cross_colour = "#444444" if few else style.COLOURS[1]
    ax.scatter([], [], s=20, color="#444444", alpha=0.3, linewidths=0, label="real")
    ax.scatter([], [], s=16, marker="x", color=cross_colour, linewidths=0.8, label="replay")
    if few:
        for i, label in enumerate(classes):
            ax.scatter([], [], s=14, color=style.COLOURS[i], label=f"class {label}")
