"""Settings as frozen dataclasses, read from TOML and from the command line. An unknown key is an error.

A field defines the key, its type, its default, its range and its help text. A recipe is a TOML file with the same
sections. `--set` overrides a key by its dotted path, or by the last part of the path if that is unique.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profcil.errors import ConfigError, nearest

OWN = "own"  # the name of the dataset that is read from `--data PATH`
SITES = "sites"  # the name of the dataset that sites of a federation hold
NONE = "none"  # the text for None, which TOML does not have


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


@dataclass(frozen=True)
class PrivacySettings(Checked):
    """What protects the examples behind the clients' replies. Runs without any of it do not store this section."""

    unit: str = setting(
        "none",
        "whose data the noise hides: that of one example from everybody, or all data of one client from everybody, "
        "without secure_sum from everybody but the server; none = no noise",
        choices=("none", "example", "client"),
    )
    epsilon: float = setting(0.0, "budget ε; the run stops before it would spend more; 0 = no budget", low=0.0)
    delta: float = setting(1e-5, "δ that ε is stated for", low=1e-12, high=0.5)
    noise_multiplier: float = setting(
        0.0,
        "noise of a reply, or of a secure sum, in units of what one example or client can change; 0 = such that the "
        "run ends at ε",
        low=0.0,
    )
    bound: float = setting(10.0, "Euclidean norm to which the features of an example are clipped", low=1e-6)
    update_bound: float = setting(1.0, "unit client: norm to which a model update is clipped", low=1e-9)
    update_quantile: float = setting(
        0.0,
        "unit client: share of the model updates that should be within the bound, which then starts at update_bound "
        "and follows them; 0 = it is fixed",
        low=0.0,
        high=1.0,
    )
    examples: int = setting(100, "unit client: the statistics of a client count for at most so many examples", low=1)
    min_support: int = setting(
        1, "a class with fewer examples than this, on a client or over all that report it, is left out", low=1
    )
    sum_support: bool = setting(
        False,
        "min_support holds for all clients of a secure sum together, by a secure sum of counts before it, not for each",
    )

    secure_sum: bool = setting(False, "the server gets the sum of the clients' replies, and no client's own")
    sum_clients: int = setting(3, "clients that a secure sum must have; a round with fewer is left out", low=2)
    sum_threshold: float = setting(
        0.6,
        "more than this share of a sum's clients must stay to the end; up to this share may collude with the server",
        low=0.5,
        high=1.0,
    )
    sum_bits: int = setting(28, "binary places of the fixed-point numbers of a secure sum", low=0, high=52)
    sum_range: float = setting(
        0.0,
        "largest size of a client's number in a secure sum, by which the bytes of a number are chosen; 0 = 8 bytes",
        low=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit != "none" and not (self.epsilon or self.noise_multiplier):
            raise ConfigError(
                f"privacy.unit = {self.unit!r} needs a budget or a noise multiplier; give privacy.epsilon or "
                "privacy.noise_multiplier"
            )
        if self.sum_support and not self.secure_sum:
            raise ConfigError(
                "privacy.sum_support counts over the clients of a secure sum; set privacy.secure_sum = true"
            )
        if self.update_quantile and self.unit != "client":
            raise ConfigError(
                "privacy.update_quantile is for model updates with privacy.unit = client; leave it out, or set the unit"
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
class ClockSettings(Checked):
    """Clocks: how long clients take in a simulation, and for whom the server waits. A deployment has real times, and of
    the modes only buffer. Runs without clocks do not store this section."""

    mode: str = setting(
        "off",
        "off: no clocks; wait: simulated time is counted, a round lasts as long as its slowest participant; buffer: "
        "the server goes on as soon as some replies have arrived, and late ones join later",
        choices=("off", "wait", "buffer"),
    )
    latency: float = setting(1.0, "simulated seconds that messages take, there and back", low=0.0)
    example_seconds: float = setting(0.01, "simulated seconds for one example in one epoch", low=0.0)
    spread: float = setting(
        0.0, "how speeds differ between clients: the standard deviation of their logarithm", low=0.0, high=5.0
    )
    stragglers: float = setting(0.0, "share of the clients that are stragglers", low=0.0, high=1.0)
    slowdown: float = setting(5.0, "how many times as long stragglers take", low=1.0)
    dropout: float = setting(
        0.0, "probability that a reply never arrives; with mode = wait it is asked for again", low=0.0, high=0.95
    )
    available: float = setting(1.0, "share of a day in which a client can start a turn", low=0.01, high=1.0)
    day: float = setting(86400.0, "simulated seconds of a day; each client's begins at a time of its own", low=1e-3)
    buffer: int = setting(
        0, "replies per update of the server; 0 = half the participants of a synchronous round, rounded up", low=0
    )
    staleness: float = setting(
        0.5,
        "a: the update of a reply counts (1 + τ)^-a, where τ is the number of updates since its turn began",
        low=0.0,
    )
    max_staleness: int = setting(
        0, "replies that are older than this many updates of the server are not used; 0 = all are", low=0
    )
    statistics: float = setting(
        0.5,
        "share of the idle clients whose statistics the server waits for; the others' join later",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if self.mode == "off" and changed:
            raise ConfigError(
                f"clock.{changed[0]} is set, but there are no clocks; set clock.mode = wait or buffer, or leave it out"
            )


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


def build(cls: type, values: Mapping[str, Any], where: str, more: str = "") -> Any:
    """Makes a settings dataclass from plain values. Unknown keys and wrong types are errors that name `where`.

    `more` is added to the message about an unknown key.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}' in {where}; {nearest(key, known)}{more}")
    coerced = {k: coerce(v, hints[k], f"{where}.{k}") for k, v in values.items()}
    return cls(**coerced)


def coerce(value: Any, kind: Any, where: str) -> Any:
    """Converts a value to the declared type of its field. Text from the command line is parsed."""
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if is_union(kind):
        return coerce_union(value, typing.get_args(kind), kind, where)
    if is_tuple(kind):
        return coerce_tuple(value, typing.get_args(kind), kind, where)
    value = parse_scalar(value, kind)
    accepted = isinstance(value, float) if kind is float else type(value) is kind
    if not accepted:
        raise ConfigError(f"{where} = {value!r} is not {describe_type(kind)}")
    return value


def parse_scalar(value: Any, kind: Any) -> Any:
    """A text as bool, int or float, and an int as float; unchanged if that is not possible."""
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, str):
            return int(value)
    except (ValueError, KeyError):
        pass
    return value


def is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union


def is_tuple(kind: Any) -> bool:
    return kind is tuple or typing.get_origin(kind) is tuple


def coerce_union(value: Any, kinds: tuple[Any, ...], kind: Any, where: str) -> Any:
    """Converts a value to one of several types: its own type if allowed, else the first that works.

    The text "none" is None if None is allowed.
    """
    says_none = isinstance(value, str) and value.lower() == NONE
    if type(None) in kinds and (value is None or says_none):
        return None
    kinds = tuple(k for k in kinds if k is not type(None))
    for one in sorted(kinds, key=lambda k: type(value) is not k):  # the type of the value first
        try:
            return coerce(value, one, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where} = {value!r} is not {describe_type(kind)}")


def coerce_tuple(value: Any, kinds: tuple[Any, ...], kind: Any, where: str) -> tuple[Any, ...]:
    """Converts a list to the declared tuple, and each of its values to its declared type."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {value!r} is not {describe_type(kind)}")
    if not kinds:
        return tuple(value)
    if is_repeated(kinds):
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ConfigError(f"{where} = {value!r} is not {describe_type(kind)}")
    pairs = zip(value, kinds, strict=True)
    return tuple(coerce(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(pairs))


def is_repeated(kinds: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of tuple[X, ...]."""
    return len(kinds) == 2 and kinds[1] is Ellipsis


def read_text(text: str, kind: Any) -> Any:
    """Parses a value of the command line. For a list or a union it is TOML, in which plain words need no quotes."""
    if not (is_union(kind) or is_tuple(kind)):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def plain(instance: Any) -> dict[str, Any]:
    """Settings as nested dicts of plain values, for TOML or JSON."""
    return dataclasses.asdict(instance)


def describe_type(kind: Any) -> str:
    """A type in words."""
    kinds = typing.get_args(kind)
    if is_union(kind):
        return " or ".join(NONE if k is type(None) else describe_type(k) for k in kinds)
    if is_tuple(kind):
        inside = ", ".join(describe_type(k) for k in kinds)
        if is_repeated(kinds):
            inside = f"each {describe_type(kinds[0])}"
        return f"a list ({inside})" if inside else "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table"}
    return words.get(kind, str(kind))
