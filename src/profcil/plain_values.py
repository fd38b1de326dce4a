"""Settings from plain values, and back. An unknown key is an error.

Plain values come from a recipe (TOML), from the command line as text, or from a file of a run. Each is converted to the
type of its field.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any

from profcil.errors import ConfigError, nearest

NONE = "none"  # the text for None, which TOML does not have


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
