"""Settings: frozen dataclasses in, TOML and flags in and out; an unknown or misspelt key is an error.

A field is at once the flag, its type, its default, its range and its help text. Recipes are TOML files of the same
shape; `--set` overrides single keys by their dotted path, or by their last part where that is unique.
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

NONE = "none"  # None as a text: TOML has no word for it


def setting(default: Any, help: str, *, low: Any = None, high: Any = None, choices: tuple = ()) -> Any:
    """A dataclass field with its help text and what it may hold."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


def check(instance: Any) -> None:
    """Every field against its range and its choices; meant for `__post_init__`. A list is checked one by one, and
    none is always in range."""
    for f in dataclasses.fields(instance):
        value, rule = getattr(instance, f.name), f.metadata
        for one in value if isinstance(value, tuple) else () if value is None else (value,):
            if rule.get("choices") and one not in rule["choices"]:
                allowed = ", ".join(map(str, rule["choices"]))
                raise ConfigError(f"{f.name} = {one!r} is not possible; choose one of {allowed}")
            low, high = rule.get("low"), rule.get("high")
            if (low is not None and one < low) or (high is not None and one > high) or one != one:
                raise ConfigError(f"{f.name} = {one!r} is out of range; it must be {limits(low, high) or 'a number'}")


def limits(low: Any, high: Any) -> str:
    """A range in words; empty where there is none."""
    if low is not None and high is not None:
        return f"between {low} and {high}"
    return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""


@dataclass(frozen=True)
class Checked:
    """A group of settings that checks itself."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class TrainSettings(Checked):
    """How clients train in every round; the same for all methods."""

    rounds: int = setting(10, "communication rounds per position", low=1)
    epochs: int = setting(3, "local epochs per phase", low=1)
    batch: int = setting(64, "examples per local step; 0 = all at once", low=0)
    optimiser: str = setting("sgd", "local optimiser", choices=("sgd", "adam"))
    lr: float = setting(0.05, "learning rate", low=0.0)
    momentum: float = setting(0.9, "momentum of SGD", low=0.0, high=1.0)
    weight_decay: float = setting(5e-4, "weight decay", low=0.0)
    decay: str = setting(
        "decoupled", "Adam's weight decay: decoupled (AdamW) or coupled", choices=("decoupled", "coupled")
    )
    clip: float = setting(5.0, "largest gradient norm of a step; 0 = no clipping", low=0.0)
    augment: bool = setting(True, "weak augmentation (crop, flip) of images in supervised steps")
    loss_limit: float = setting(1e4, "a client's mean loss above this counts as exploded", low=0.0)
    on_divergence: str = setting(
        "fail", "what to do with a client whose loss is NaN or explodes", choices=("fail", "skip-client")
    )


@dataclass(frozen=True)
class WarmupSettings(Checked):
    """The shared self-supervised start: federated, no labels, the same for all methods."""

    rounds: int = setting(10, "warm-up rounds; 0 = start from random weights", low=0)
    epochs: int = setting(1, "local epochs per warm-up round", low=1)
    batch: int = setting(64, "examples per contrastive step", low=2)
    temperature: float = setting(0.5, "temperature of the contrastive loss", low=1e-3)
    optimiser: str = setting("sgd", "local optimiser of the warm-up", choices=("sgd", "adam"))
    lr: float = setting(0.05, "learning rate of the warm-up", low=0.0)
    momentum: float = setting(0.9, "momentum of SGD in the warm-up", low=0.0, high=1.0)
    weight_decay: float = setting(5e-4, "weight decay of the warm-up", low=0.0)
    decay: str = setting(
        "decoupled", "Adam's weight decay in the warm-up: decoupled or coupled", choices=("decoupled", "coupled")
    )
    clip: float = setting(5.0, "largest gradient norm of a warm-up step; 0 = no clipping", low=0.0)
    projector: str = setting(
        "averaged",
        "the projector of Eq. (warmup): sent and averaged like the base, or local to each client, as the paper says",
        choices=("averaged", "local"),
    )


@dataclass(frozen=True)
class ModelSettings(Checked):
    """The encoder and what sits on it."""

    encoder: str = setting("", "base encoder; empty = the dataset's own")
    norm: str = setting("batch", "normalisation inside the encoder", choices=("batch", "group", "none"))
    width: int = setting(0, "encoder width; 0 = its own default", low=0)
    bottleneck: int = setting(4, "the adapter is this many times narrower than the features", low=1)
    head: str = setting("linear", "classifier head", choices=("linear", "cosine"))
    precision: str = setting(
        "auto",
        "products while the encoder trains; auto = bf16 for image convolutions on a GPU, else float32",
        choices=("auto", "float32", "bf16"),
    )


def build(cls: type, values: Mapping[str, Any], where: str, more: str = "") -> Any:
    """A settings dataclass from plain values: unknown keys and wrong types are errors that name the place. `more`
    says where all keys can be seen."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}' in {where}; {nearest(key, known)}{more}")
    return cls(**{k: coerce(v, hints[k], f"{where}.{k}") for k, v in values.items()})


def coerce(value: Any, kind: Any, where: str) -> Any:
    """A value as the type its field declares; text from the command line is read, nothing is guessed."""
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if is_union(kind):
        return one_of(value, typing.get_args(kind), kind, where)
    if kind is tuple or typing.get_origin(kind) is tuple:
        return tuple_of(value, typing.get_args(kind), kind, where)
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, str):
            return int(value)
    except (ValueError, KeyError):
        pass
    if kind is float and isinstance(value, float):
        return value
    if type(value) is not kind:
        raise ConfigError(f"{where} = {value!r} is not {spoken(kind)}")
    return value


def is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union


def one_of(value: Any, kinds: tuple[Any, ...], kind: Any, where: str) -> Any:
    """A value of several possible types: its own where that is among them, else the first that can be made of it.
    The text "none" is None where None is possible."""
    if type(None) in kinds and (value is None or (isinstance(value, str) and value.lower() == NONE)):
        return None
    kinds = tuple(k for k in kinds if k is not type(None))
    for one in sorted(kinds, key=lambda k: type(value) is not k):  # stable: the value's own type first
        try:
            return coerce(value, one, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where} = {value!r} is not {spoken(kind)}")


def tuple_of(value: Any, kinds: tuple[Any, ...], kind: Any, where: str) -> tuple[Any, ...]:
    """A list as the tuple that a field declares, its parts checked too."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {value!r} is not {spoken(kind)}")
    if not kinds:
        return tuple(value)
    each = (kinds[0],) * len(value) if len(kinds) == 2 and kinds[1] is Ellipsis else kinds
    if len(each) != len(value):
        raise ConfigError(f"{where} = {value!r} is not {spoken(kind)}")
    return tuple(coerce(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(zip(value, each, strict=True)))


def read_text(text: str, kind: Any) -> Any:
    """A value from the command line. Where a field may hold a list or several types, the text is a TOML value; plain
    words need no quotes."""
    if not (is_union(kind) or kind is tuple or typing.get_origin(kind) is tuple):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def plain(instance: Any) -> dict[str, Any]:
    """Settings as nested plain values, ready for TOML or JSON."""
    return dataclasses.asdict(instance)


def spoken(kind: Any) -> str:
    """A type in words."""
    kinds = typing.get_args(kind)
    if is_union(kind):
        return " or ".join(NONE if k is type(None) else spoken(k) for k in kinds)
    if kind is tuple or typing.get_origin(kind) is tuple:
        several = len(kinds) == 2 and kinds[1] is Ellipsis
        inside = f"each {spoken(kinds[0])}" if several else ", ".join(spoken(k) for k in kinds)
        return f"a list ({inside})" if inside else "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table"}
    return words.get(kind, str(kind))
