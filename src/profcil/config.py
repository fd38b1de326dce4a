"""Settings: frozen dataclasses in, TOML and flags in and out; an unknown or misspelt key is an error.

A field is at once the flag, its type, its default, its range and its help text. Recipes are TOML files of the same
shape; `--set` overrides single keys by their dotted path, or by their last part where that is unique.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profcil.errors import ConfigError, nearest


def setting(default: Any, help: str, *, low: Any = None, high: Any = None, choices: tuple = ()) -> Any:
    """A dataclass field with its help text and what it may hold."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


def check(instance: Any) -> None:
    """Every field against its range and its choices; meant for `__post_init__`."""
    for f in dataclasses.fields(instance):
        value, rule = getattr(instance, f.name), f.metadata
        if rule.get("choices") and value not in rule["choices"]:
            allowed = ", ".join(map(str, rule["choices"]))
            raise ConfigError(f"{f.name} = {value!r} is not possible; choose one of {allowed}")
        low, high = rule.get("low"), rule.get("high")
        if (low is not None and value < low) or (high is not None and value > high) or value != value:
            limit = f"between {low} and {high}" if high is not None else f"at least {low}"
            raise ConfigError(f"{f.name} = {value!r} is out of range; it must be {limit}")


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


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """A settings dataclass from plain values: unknown keys and wrong types are errors that name the place."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}' in {where}; {nearest(key, known)}")
    return cls(**{k: coerce(v, hints[k], f"{where}.{k}") for k, v in values.items()})


def coerce(value: Any, kind: Any, where: str) -> Any:
    """A value as the type its field declares; text from the command line is read, nothing is guessed."""
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is tuple:
        return tuple(value) if isinstance(value, list) else value
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
        raise ConfigError(f"{where} = {value!r} is not {_spoken(kind)}")
    return value


def plain(instance: Any) -> dict[str, Any]:
    """Settings as nested plain values, ready for TOML or JSON."""
    return dataclasses.asdict(instance)


def _spoken(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))
