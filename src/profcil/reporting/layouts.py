"""The paper's tables: which study feeds each, what its rows and columns are, and where the paper's figure lies."""

from __future__ import annotations

from collections.abc import Callable

from profcil.reporting.grid import Item, Layout
from profcil.reporting.paper import Figure, figure, title

MAIN = ("comm", "faa", "cta", "af")
BOTH = ("faa", "cta", "af", "comm")
TRAFFIC = ("mb_down", "mb_up", "comm")
TIMES = ("seconds", "warmup_seconds", "total_seconds", "peak_memory_mb", "server_mb", "client_mb")


def alone(item: Item, metric: str) -> str | None:
    """No heading over the columns."""
    return ""


def by_setting(item: Item, metric: str) -> str | None:
    return item.config["setting"]


def by_control(name: str) -> Callable[[Item, str], str | None]:
    return lambda item, metric: f"{name} {item.config['stream'][name]:.0%}"


def dataset_method(item: Item) -> tuple[str, ...]:
    return item.config["dataset"], title(item.method)


def results(item: Item, metric: str) -> Figure | None:
    """A main result; of the homogeneous tables the paper has one per budget regime."""
    place = item.config["setting"] + ("_expanded" if item.variant == "expanded" else "")
    return figure("results", item.config["dataset"], place, item.method, metric)


def swept(name: str) -> Callable[[Item, str], Figure | None]:
    return lambda item, metric: figure(
        name, item.config["dataset"], str(item.config["stream"][name]), item.method, metric
    )


def ablated(item: Item, metric: str) -> Figure | None:
    return figure("ablation", item.config["dataset"], item.variant, metric)


def knob(item: Item) -> tuple[str, str]:
    """Which setting a sensitivity run turns, and to what."""
    name, _, value = item.variant.rpartition(" ")
    return name, value


def sensitive(item: Item, metric: str) -> Figure | None:
    return figure("sensitivity", item.config["dataset"], *knob(item), metric)


def mismatched(item: Item, metric: str) -> Figure | None:
    strongest = item.config["stream"]["weak_strength"] == "severe"
    return figure("mismatch", item.config["dataset"], item.method, metric) if strongest else None


def accounting(item: Item, metric: str) -> str | None:
    """Traffic under the accounting of the run; the rest from the runs that send what has changed."""
    transfer = item.config["transfer"]
    return transfer if metric in TRAFFIC else "" if transfer == "changed" else None


def costs(item: Item, metric: str) -> Figure | None:
    """The paper's costs in our units. Its traffic is under full accounting; its peak is the GPU's where ours is."""
    device = "cpu" if item.config["device"] == "cpu" else "gpu"
    names = {"seconds": ("hours", 3600.0), "warmup_seconds": ("warmup_hours", 3600.0)}
    names |= {"peak_memory_mb": (f"{device}_gb", 1e3)}
    if item.config["transfer"] == "full":
        names |= {"mb_down": ("down_gb", 1e3), "mb_up": ("up_gb", 1e3), "comm": ("comm", 1.0)}
    name, unit = names.get(metric, ("", 1.0))
    found = figure("cost", item.config["dataset"], item.method, name)
    return (found[0] * unit, None) if found else None


LAYOUTS: dict[str, Layout] = {
    "homogeneous": Layout(
        "Without heterogeneity, resource-matched and resource-expanded",
        ("homogeneous",),
        ("dataset", "regime", "method"),
        lambda i: (i.config["dataset"], i.variant or i.config["regime"], title(i.method)),
        MAIN,
        alone,
        results,
        lambda i: i.config["setting"] == "homogeneous",
    ),
    "severe": Layout(
        "Under severe heterogeneity, with the expanded replay budget",
        ("severe",),
        ("dataset", "method"),
        dataset_method,
        MAIN,
        alone,
        results,
        lambda i: i.config["setting"] == "severe",
    ),
    "support-sweep": Layout(
        "Supervision support: the fraction of clients that support each task",
        ("support-sweep",),
        ("dataset", "method"),
        dataset_method,
        ("faa", "af"),
        by_control("support"),
        swept("support"),
    ),
    "order-sweep": Layout(
        "Stage misalignment: the fraction of task positions perturbed per client",
        ("order-sweep",),
        ("dataset", "method"),
        dataset_method,
        ("faa", "af"),
        by_control("disorder"),
        swept("disorder"),
    ),
    "ablation": Layout(
        "PRO-MAX without its parts, under severe heterogeneity",
        ("ablation",),
        ("dataset", "variant"),
        lambda i: (i.config["dataset"], i.variant or title(i.method)),
        MAIN,
        alone,
        ablated,
        by_method=False,
        tested=False,
    ),
    "sensitivity": Layout(
        "Sensitivity of PRO-MAX, one setting at a time",
        ("sensitivity",),
        ("dataset", "setting", "value"),
        lambda i: (i.config["dataset"], *knob(i)),
        ("faa", "af", "client_mb"),
        alone,
        sensitive,
        lambda i: " " in i.variant,
        by_method=False,
        tested=False,
    ),
    "modality": Layout(
        "Text and graphs, with and without heterogeneity",
        ("modality",),
        ("dataset", "method"),
        dataset_method,
        BOTH,
        by_setting,
        results,
    ),
    "scale-up": Layout(
        "Longer and larger streams, with and without heterogeneity",
        ("scale-up",),
        ("dataset", "method"),
        dataset_method,
        BOTH,
        by_setting,
        results,
    ),
    "cta": Layout(
        "Current-task accuracy under severe heterogeneity",
        ("severe", "modality", "scale-up"),
        ("method",),
        lambda i: (title(i.method),),
        ("cta",),
        lambda i, metric: i.config["dataset"],
        results,
        lambda i: i.config["setting"] == "severe",
    ),
    "weak-task": Layout(
        "Weak task, replay mismatch and downstream drop",
        ("weak-task",),
        ("dataset", "strength", "method"),
        lambda i: (i.config["dataset"], i.config["stream"]["weak_strength"] or "clean", title(i.method)),
        ("weak_accuracy", "mmd2", "w1", "cosine", "drop", "faa", "af"),
        alone,
        mismatched,
        note="The paper does not say at which strength its figures were taken; they stand beside the severe ones.",
    ),
    "memory-snapshots": Layout(
        "Alignment of old memories with true class means after the last position",
        ("memory-snapshots",),
        ("dataset", "method"),
        dataset_method,
        ("align", "align_z", "centred", "af"),
        alone,
        lambda i, metric: figure("alignment", i.config["dataset"], i.method, metric),
        tested=False,
    ),
    "cost": Layout(
        "Traffic in both accountings, time and memory",
        ("cost",),
        ("dataset", "method"),
        dataset_method,
        (*TRAFFIC, *TIMES),
        accounting,
        costs,
        tested=False,
        note="`changed` and `full` are measured by runs of that accounting; `transfer` alters no result. NormComm is "
        "relative to FedAvg under the same accounting. Warm-up traffic, the same for all, is left out.",
    ),
}
