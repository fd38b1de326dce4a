"""The tables of the paper: which study each one shows, its rows and columns, and where the paper's values are."""

from __future__ import annotations

from collections.abc import Callable

from profcil.reporting.grid import Item, Layout
from profcil.reporting.paper import PaperValue, method_title, paper_value

MAIN_METRICS = ("comm", "faa", "cta", "af")
SETTING_METRICS = ("faa", "cta", "af", "comm")
TRAFFIC = ("mb_down", "mb_up", "comm")
TIME_AND_MEMORY = ("seconds", "warmup_seconds", "total_seconds", "peak_memory_mb", "server_mb", "client_mb")


def no_group(item: Item, metric: str) -> str | None:
    """No heading above the columns."""
    return ""


def group_by_setting(item: Item, metric: str) -> str | None:
    return item.config["setting"]


def group_by_stream_value(name: str) -> Callable[[Item, str], str | None]:
    """A group of columns for each value of a stream setting."""
    return lambda item, metric: f"{name} {item.config['stream'][name]:.0%}"


def group_by_transfer(item: Item, metric: str) -> str | None:
    """Traffic under the `transfer` setting of the run; all else only from runs with `transfer = "changed"`."""
    transfer = item.config["transfer"]
    if metric in TRAFFIC:
        return transfer
    return "" if transfer == "changed" else None


def dataset_and_method(item: Item) -> tuple[str, ...]:
    return item.config["dataset"], method_title(item.method)


def setting_and_value(item: Item) -> tuple[str, str]:
    """The setting that a sensitivity run changes, and its value."""
    name, _, value = item.variant.rpartition(" ")
    return name, value


def paper_result(item: Item, metric: str) -> PaperValue | None:
    """A main result. The paper has one homogeneous table for each budget regime."""
    suffix = "_expanded" if item.variant == "expanded" else ""
    return paper_value("results", item.config["dataset"], item.config["setting"] + suffix, item.method, metric)


def paper_sweep(name: str) -> Callable[[Item, str], PaperValue | None]:
    """The results of the paper's sweep over a stream setting."""

    def find(item: Item, metric: str) -> PaperValue | None:
        return paper_value(name, item.config["dataset"], str(item.config["stream"][name]), item.method, metric)

    return find


def paper_ablation(item: Item, metric: str) -> PaperValue | None:
    return paper_value("ablation", item.config["dataset"], item.variant, metric)


def paper_sensitivity(item: Item, metric: str) -> PaperValue | None:
    return paper_value("sensitivity", item.config["dataset"], *setting_and_value(item), metric)


def paper_mismatch(item: Item, metric: str) -> PaperValue | None:
    if item.config["stream"]["weak_strength"] != "severe":
        return None
    return paper_value("mismatch", item.config["dataset"], item.method, metric)


def paper_alignment(item: Item, metric: str) -> PaperValue | None:
    return paper_value("alignment", item.config["dataset"], item.method, metric)


def paper_cost(item: Item, metric: str) -> PaperValue | None:
    """The paper's costs in our units. Its traffic counts full transfers. Its memory is that of the device we use."""
    device = "cpu" if item.config["device"] == "cpu" else "gpu"
    names = {
        "seconds": ("hours", 3600.0),
        "warmup_seconds": ("warmup_hours", 3600.0),
        "peak_memory_mb": (f"{device}_gb", 1e3),
    }
    if item.config["transfer"] == "full":
        names |= {"mb_down": ("down_gb", 1e3), "mb_up": ("up_gb", 1e3), "comm": ("comm", 1.0)}
    name, unit = names.get(metric, ("", 1.0))
    found = paper_value("cost", item.config["dataset"], item.method, name)
    return (found[0] * unit, None) if found else None


LAYOUTS: dict[str, Layout] = {
    "homogeneous": Layout(
        "Without heterogeneity, resource-matched and resource-expanded",
        ("homogeneous",),
        ("dataset", "regime", "method"),
        lambda i: (i.config["dataset"], i.variant or i.config["regime"], method_title(i.method)),
        MAIN_METRICS,
        no_group,
        paper_result,
        lambda i: i.config["setting"] == "homogeneous",
    ),
    "severe": Layout(
        "Under severe heterogeneity, with the expanded replay budget",
        ("severe",),
        ("dataset", "method"),
        dataset_and_method,
        MAIN_METRICS,
        no_group,
        paper_result,
        lambda i: i.config["setting"] == "severe",
    ),
    "support-sweep": Layout(
        "Supervision support: the fraction of clients that support each task",
        ("support-sweep",),
        ("dataset", "method"),
        dataset_and_method,
        ("faa", "af"),
        group_by_stream_value("support"),
        paper_sweep("support"),
    ),
    "order-sweep": Layout(
        "Stage misalignment: the fraction of task positions perturbed per client",
        ("order-sweep",),
        ("dataset", "method"),
        dataset_and_method,
        ("faa", "af"),
        group_by_stream_value("disorder"),
        paper_sweep("disorder"),
    ),
    "ablation": Layout(
        "PRO-MAX without its parts, under severe heterogeneity",
        ("ablation",),
        ("dataset", "variant"),
        lambda i: (i.config["dataset"], i.variant or method_title(i.method)),
        MAIN_METRICS,
        no_group,
        paper_ablation,
        by_method=False,
        tested=False,
    ),
    "sensitivity": Layout(
        "Sensitivity of PRO-MAX, one setting at a time",
        ("sensitivity",),
        ("dataset", "setting", "value"),
        lambda i: (i.config["dataset"], *setting_and_value(i)),
        ("faa", "af", "client_mb"),
        no_group,
        paper_sensitivity,
        lambda i: " " in i.variant,
        by_method=False,
        tested=False,
    ),
    "modality": Layout(
        "Text and graphs, with and without heterogeneity",
        ("modality",),
        ("dataset", "method"),
        dataset_and_method,
        SETTING_METRICS,
        group_by_setting,
        paper_result,
    ),
    "scale-up": Layout(
        "Longer and larger streams, with and without heterogeneity",
        ("scale-up",),
        ("dataset", "method"),
        dataset_and_method,
        SETTING_METRICS,
        group_by_setting,
        paper_result,
    ),
    "cta": Layout(
        "Current-task accuracy under severe heterogeneity",
        ("severe", "modality", "scale-up"),
        ("method",),
        lambda i: (method_title(i.method),),
        ("cta",),
        lambda i, metric: i.config["dataset"],
        paper_result,
        lambda i: i.config["setting"] == "severe",
    ),
    "weak-task": Layout(
        "Weak task, replay mismatch and downstream drop",
        ("weak-task",),
        ("dataset", "strength", "method"),
        lambda i: (i.config["dataset"], i.config["stream"]["weak_strength"] or "clean", method_title(i.method)),
        ("weak_accuracy", "mmd2", "w1", "cosine", "drop", "faa", "af"),
        no_group,
        paper_mismatch,
        note="The paper does not name the strength of its values; they are shown beside the severe ones.",
    ),
    "memory-snapshots": Layout(
        "Alignment of old memories with true class means after the last position",
        ("memory-snapshots",),
        ("dataset", "method"),
        dataset_and_method,
        ("align", "align_z", "centred", "af"),
        no_group,
        paper_alignment,
        tested=False,
    ),
    "cost": Layout(
        "Traffic for both ways of counting it, time and memory",
        ("cost",),
        ("dataset", "method"),
        dataset_and_method,
        (*TRAFFIC, *TIME_AND_MEMORY),
        group_by_transfer,
        paper_cost,
        tested=False,
        note="`changed` and `full` are values of the setting `transfer`, which changes no result. NormComm is relative "
        "to FedAvg with the same `transfer`. Warm-up traffic, the same for all methods, is excluded.",
    ),
}
