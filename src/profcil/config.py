"""Settings as frozen dataclasses: what a setting is, and most sections of the settings of a run.

A field defines the key, its type, its default, its range and its help text. A recipe is a TOML file with the same
sections. `--set` overrides a key by its dotted path, or by the last part of the path if that is unique.

The sections [stream], [clock] and [privacy] are in the packages `protocol` and `privacy`. `plain_values` makes settings
of TOML and of text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profcil.errors import ConfigError

OWN = "own"  # the name of the dataset that is read from `--data PATH`
SITES = "sites"  # the name of the dataset that sites of a federation hold


def setting(default: Any, help: str, *, low: Any = None, high: Any = None, choices: tuple = ()) -> Any:
    """A dataclass field with its help text, range and choices."""
    metadata = {"help": help, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=metadata)


def check(instance: Any) -> None:
    """Checks every field against its range and its choices. Each value of a list is checked; None is always valid."""
    for f in dataclasses.fields(instance):
        value = getattr(instance, f.name)
        if value is None:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            check_value(f.name, each, f.metadata)


def check_value(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    if rule.get("choices") and value not in rule["choices"]:
        allowed = ", ".join(map(str, rule["choices"]))
        raise ConfigError(f"{name} = {value!r} is not possible; choose one of {allowed}")
    low = rule.get("low")
    high = rule.get("high")
    is_nan = value != value
    too_low = low is not None and value < low
    too_high = high is not None and value > high
    if too_low or too_high or is_nan:
        allowed = describe_range(low, high) or "a number"
        raise ConfigError(f"{name} = {value!r} is out of range; it must be {allowed}")


def describe_range(low: Any, high: Any) -> str:
    """A range in words; empty if there are no bounds."""
    if low is not None and high is not None:
        return f"between {low} and {high}"
    if low is not None:
        return f"at least {low}"
    return f"at most {high}" if high is not None else ""


@dataclass(frozen=True)
class Checked:
    """A group of settings whose values are checked when it is made."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class TrainSettings(Checked):
    """The local training of clients in every round, the same for all methods."""

    rounds: int = setting(10, "communication rounds per position", low=1)
    early_stop: int = setting(
        0, "skip the rest of a position's rounds after this many without a better validation FAA; 0 = off", low=0
    )
    epochs: int = setting(3, "local epochs per phase", low=1)
    batch: int = setting(64, "batch size of a local step; 0 = all examples", low=0)
    optimiser: str = setting("sgd", "local optimiser", choices=("sgd", "adam"))
    lr: float = setting(0.05, "learning rate", low=0.0)
    momentum: float = setting(0.9, "momentum of SGD", low=0.0, high=1.0)
    weight_decay: float = setting(5e-4, "weight decay", low=0.0)
    decay: str = setting(
        "decoupled", "weight decay of Adam: decoupled (AdamW) or coupled", choices=("decoupled", "coupled")
    )
    clip: float = setting(5.0, "gradient norm to which a step is clipped; 0 = no clipping", low=0.0)
    augment: bool = setting(True, "weak augmentation (crop, flip) of images in supervised steps")
    loss_limit: float = setting(1e4, "a client with a larger mean loss counts as diverged", low=0.0)
    on_divergence: str = setting(
        "fail", "what to do when a client diverges (loss NaN or too large)", choices=("fail", "skip-client")
    )


@dataclass(frozen=True)
class WarmupSettings(Checked):
    """The shared warm-up: federated self-supervised training without labels, the same for all methods."""

    rounds: int = setting(10, "warm-up rounds; 0 = start from random weights", low=0)
    epochs: int = setting(1, "local epochs per warm-up round", low=1)
    batch: int = setting(64, "batch size of a contrastive step", low=2)
    temperature: float = setting(0.5, "temperature of the contrastive loss", low=1e-3)
    optimiser: str = setting("sgd", "local optimiser of the warm-up", choices=("sgd", "adam"))
    lr: float = setting(0.05, "learning rate of the warm-up", low=0.0)
    momentum: float = setting(0.9, "momentum of SGD in the warm-up", low=0.0, high=1.0)
    weight_decay: float = setting(5e-4, "weight decay of the warm-up", low=0.0)
    decay: str = setting(
        "decoupled", "weight decay of Adam in the warm-up: decoupled or coupled", choices=("decoupled", "coupled")
    )
    clip: float = setting(5.0, "gradient norm to which a warm-up step is clipped; 0 = no clipping", low=0.0)
    projector: str = setting(
        "averaged",
        "projector of the warm-up: averaged like the base, or local to each client, as in the paper",
        choices=("averaged", "local"),
    )


@dataclass(frozen=True)
class ModelSettings(Checked):
    """The encoder, the adapter and the head."""

    encoder: str = setting("", "base encoder; empty = the default of the dataset")
    norm: str = setting("batch", "normalisation inside the encoder", choices=("batch", "group", "none"))
    width: int = setting(0, "width of the encoder; 0 = the default of the encoder", low=0)
    bottleneck: int = setting(4, "feature width divided by adapter width", low=1)
    head: str = setting("linear", "classifier head", choices=("linear", "cosine"))
    precision: str = setting(
        "auto",
        "precision of products while the encoder trains; auto = bf16 for image convolutions on a GPU, else float32",
        choices=("auto", "float32", "bf16"),
    )


@dataclass(frozen=True)
class RobustSettings(Checked):
    """What the server does about false replies. Runs that do nothing (`mean`) do not store this section."""

    aggregation: str = setting(
        "mean",
        "how replies are combined: by the method alone, or after a rule that limits what false ones can do",
        choices=("mean", "clipped", "median", "trimmed", "krum", "geometric"),
    )
    quarantine: int = setting(
        3, "rounds with a dropped reply after which a client is not asked again; 0 = it always is", low=0
    )


FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ChannelSettings(Checked):
    """How numbers cross between clients and server, and which of them. Runs with the defaults do not store this
    section."""

    memory: str = setting(
        "float32",
        "numbers of the memory that clients are sent; int8 has one scale per class",
        choices=(*FLOATS, "int8"),
    )
    transport: str = setting(
        "float32",
        "numbers of the shifts of remembered classes that clients send; int8 has one scale per class",
        choices=(*FLOATS, "int8"),
    )
    statistics: str = setting("float32", "numbers of the statistics that clients send", choices=FLOATS)
    model: str = setting("float32", "numbers of model blocks in both directions, after the warm-up", choices=FLOATS)
    rows: str = setting(
        "all",
        "rows of a memory that has changed: all, or those of classes that the client does not hold as they are now",
        choices=("all", "changed"),
    )
    nearest: int = setting(
        0, "remembered classes that a client is sent besides its own: the nearest to its own; 0 = all", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nearest and self.rows == "changed":
            raise ConfigError(
                "channel.nearest sends each client rows of its own, for which channel.rows = changed keeps no record; "
                "set one of them"
            )

    @property
    def coding(self) -> dict[str, str]:
        """The encoding of each kind of block that is not sent as it is."""
        kinds = ("memory", "transport", "statistics", "model")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind) != "float32"}


@dataclass(frozen=True)
class OwnSettings(Checked):
    """How own data is read (`--data PATH`). Runs on other datasets do not store this section."""

    name: str = setting("", "name of the data in tables; empty = that of the file or folder")
    modality: str = setting(
        "",
        "what the data is; empty = found from the files",
        choices=("", "image", "text", "graph", "table"),
    )
    label: str = setting("", "column of the class; empty = found by name (label, class, target, ...)")
    text: str = setting("", "column of the text; empty = found by name (text, sentence, ...)")
    ignore: tuple[str, ...] = setting((), "columns that are not used")
    encoding: str = setting("utf-8", "encoding of text files")
    shape: tuple[int, ...] = setting(
        (), "channels, height and width of images; empty = as most images, at most 64", low=1
    )
    length: int = setting(0, "tokens that are read of a text; 0 = enough for 95 of 100 texts, at most 256", low=0)
    vocabulary: int = setting(
        0, "words that get a token id of their own, the most frequent ones; 0 = 8,000, or 20,000 for many texts", low=0
    )
    test_share: float = setting(
        0.2, "share of each class that is tested on, if the data has no test part", low=0.01, high=0.9
    )
    tasks: int = setting(0, "number of tasks; 0 = by stream.task_size", low=0)
    order: str = setting(
        "seed",
        "order of classes: drawn with the seed, or as they first appear in the data",
        choices=("seed", "arrival"),
    )
    task_list: tuple[tuple[str, ...], ...] = setting((), "the tasks as lists of class names; empty = by the two above")
