"""The tables of the paper: which study each one shows, its rows and columns, and where the paper's values are."""

from __future__ import annotations

from collections.abc import Callable

from profcil.reporting.grid import Item, TableLayout
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
    setting = item.config["setting"]
    if item.variant == "expanded":
        setting += "_expanded"
    return paper_value("results", item.config["dataset"], setting, item.method, metric)


def paper_sweep(name: str) -> Callable[[Item, str], PaperValue | None]:
    """The results of the paper's sweep over a stream setting."""

    def find(item: Item, metric: str) -> PaperValue | None:
        value = str(item.config["stream"][name])
        return paper_value(name, item.config["dataset"], value, item.method, metric)

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
    value = paper_value("cost", item.config["dataset"], item.method, name)
    if value is None:
        return None
    mean, _ = value
    return mean * unit, None


HOMOGENEOUS = TableLayout(
    title="Without heterogeneity, resource-matched and resource-expanded",
    studies=("homogeneous",),
    heads=("dataset", "regime", "method"),
    names=lambda i: (i.config["dataset"], i.variant or i.config.get("regime", ""), method_title(i.method)),
    metrics=MAIN_METRICS,
    group=no_group,
    paper=paper_result,
    keep=lambda i: i.config["setting"] == "homogeneous",
)
SEVERE = TableLayout(
    title="Under severe heterogeneity, with the expanded replay budget",
    studies=("severe",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=MAIN_METRICS,
    group=no_group,
    paper=paper_result,
    keep=lambda i: i.config["setting"] == "severe",
)
SUPPORT_SWEEP = TableLayout(
    title="Supervision support: the fraction of clients that support each task",
    studies=("support-sweep",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=("faa", "af"),
    group=group_by_stream_value("support"),
    paper=paper_sweep("support"),
)
ORDER_SWEEP = TableLayout(
    title="Stage misalignment: the fraction of task positions perturbed per client",
    studies=("order-sweep",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=("faa", "af"),
    group=group_by_stream_value("disorder"),
    paper=paper_sweep("disorder"),
)
ABLATION = TableLayout(
    title="PRO-MAX without its parts, under severe heterogeneity",
    studies=("ablation",),
    heads=("dataset", "variant"),
    names=lambda i: (i.config["dataset"], i.variant or method_title(i.method)),
    metrics=MAIN_METRICS,
    group=no_group,
    paper=paper_ablation,
    by_method=False,
    tested=False,
)
SENSITIVITY = TableLayout(
    title="Sensitivity of PRO-MAX, one setting at a time",
    studies=("sensitivity",),
    heads=("dataset", "setting", "value"),
    names=lambda i: (i.config["dataset"], *setting_and_value(i)),
    metrics=("faa", "af", "client_mb"),
    group=no_group,
    paper=paper_sensitivity,
    keep=lambda i: " " in i.variant,
    by_method=False,
    tested=False,
)
MODALITY = TableLayout(
    title="Text and graphs, with and without heterogeneity",
    studies=("modality",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=SETTING_METRICS,
    group=group_by_setting,
    paper=paper_result,
)
SCALE_UP = TableLayout(
    title="Longer and larger streams, with and without heterogeneity",
    studies=("scale-up",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=SETTING_METRICS,
    group=group_by_setting,
    paper=paper_result,
)
CTA = TableLayout(
    title="Current-task accuracy under severe heterogeneity",
    studies=("severe", "modality", "scale-up"),
    heads=("method",),
    names=lambda i: (method_title(i.method),),
    metrics=("cta",),
    group=lambda i, metric: i.config["dataset"],
    paper=paper_result,
    keep=lambda i: i.config["setting"] == "severe",
)
WEAK_TASK = TableLayout(
    title="Weak task, replay mismatch and downstream drop",
    studies=("weak-task",),
    heads=("dataset", "strength", "method"),
    names=lambda i: (i.config["dataset"], i.config["stream"]["weak_strength"] or "clean", method_title(i.method)),
    metrics=("weak_accuracy", "mmd2", "w1", "cosine", "drop", "faa", "af"),
    group=no_group,
    paper=paper_mismatch,
    note="The paper does not name the strength of its values; they are shown beside the severe ones.",
)
MEMORY_SNAPSHOTS = TableLayout(
    title="Alignment of old memories with true class means after the last position",
    studies=("memory-snapshots",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=("align", "align_z", "centred", "af"),
    group=no_group,
    paper=paper_alignment,
    tested=False,
)
COST = TableLayout(
    title="Traffic for both ways of counting it, time and memory",
    studies=("cost",),
    heads=("dataset", "method"),
    names=dataset_and_method,
    metrics=(*TRAFFIC, *TIME_AND_MEMORY),
    group=group_by_transfer,
    paper=paper_cost,
    tested=False,
    note="`changed` and `full` are values of the setting `transfer`, which changes no result. NormComm is relative "
    "to FedAvg with the same `transfer`. Warm-up traffic, the same for all methods, is excluded.",
)

LAYOUTS: dict[str, TableLayout] = {
    "homogeneous": HOMOGENEOUS,
    "severe": SEVERE,
    "support-sweep": SUPPORT_SWEEP,
    "order-sweep": ORDER_SWEEP,
    "ablation": ABLATION,
    "sensitivity": SENSITIVITY,
    "modality": MODALITY,
    "scale-up": SCALE_UP,
    "cta": CTA,
    "weak-task": WEAK_TASK,
    "memory-snapshots": MEMORY_SNAPSHOTS,
    "cost": COST,
}
