"""Every setting with its type, default, range and help text, read from the dataclasses that hold them."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.config import limits, plain, spoken
from profcil.errors import DataError, unknown
from profcil.io.atomic_files import write_text
from profcil.resolve import SECTIONS, SETTINGS, TOP, RunConfig, resolve, toml_value

TITLE = "# Settings"
HEAD = f"""{TITLE}

Written by `profcil list settings --page docs/settings.md` from the dataclasses that hold them. Each is a key
of a recipe (TOML), and of `--set key=value` by its dotted name, or by its last part where that is unique. A dataset's
recipe goes before these defaults: `profcil list settings --dataset NAME --method NAME` shows what a run would have.
"""
COLUMNS = ("setting", "type", "default", "allowed", "what it is")
BY_SETTING = {key for values in SETTINGS.values() for key in values}  # what `setting` stands for


def rows(method: str | None = None, dataset: str | None = None) -> list[dict[str, Any]]:
    """The settings of every run, then those of all methods or of one. A default is a TOML value; with a dataset it is
    what a run on it has, and empty where neither a default nor a recipe gives one."""
    if dataset is not None and dataset not in registry.names("data"):
        raise unknown("dataset", dataset, registry.names("data"))
    found = {
        name: registry.find("methods", name).METHOD for name in ([method] if method else registry.names("methods"))
    }
    common = [*described(RunConfig, "", "every run"), *sections("every run")]
    own = [row for name, cls in found.items() for row in described(cls.Params, "params.", name)]
    if dataset is None:
        return [*common, *own]
    values = {name: nested(resolve(None, {"dataset": dataset, "method": name})) for name in found}
    shared = nested(resolve(None, {"dataset": dataset, "method": method}))
    return [*(valued(row, shared) for row in common), *(valued(row, values[row["of"]]) for row in own)]


def sections(of: str) -> Iterator[dict[str, Any]]:
    for name, cls in SECTIONS.items():
        yield from described(cls, f"{name}.", of)


def described(cls: type, prefix: str, of: str) -> Iterator[dict[str, Any]]:
    """A dataclass's fields, one row each."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if cls is RunConfig and f.name not in TOP:
            continue
        yield {
            "setting": prefix + f.name,
            "of": of,
            "type": re.sub(r"\ba ", "", spoken(hints[f.name])),
            "default": default(f, prefix),
            "allowed": allowed(f.metadata),
            "help": f.metadata.get("help", ""),
        }


def default(f: dataclasses.Field, prefix: str) -> str | None:
    if prefix == "stream." and f.name in BY_SETTING:
        return ", ".join(f"{name} {values[f.name]}" for name, values in SETTINGS.items())
    if f.default_factory is not dataclasses.MISSING:
        return toml_value(f.default_factory())
    return None if f.default is dataclasses.MISSING else toml_value(f.default)


def allowed(rule: Mapping[str, Any]) -> str:
    if rule.get("choices"):
        return ", ".join(str(choice) or '""' for choice in rule["choices"])
    return limits(rule.get("low"), rule.get("high"))


def nested(config: RunConfig) -> dict[str, Any]:
    """Every value by its dotted name."""
    values = plain(config)
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    flat = {f"{name}.{k}": v for name, table in tables.items() for k, v in table.items()}
    return {k: v for k, v in values.items() if k not in tables} | flat


def valued(row: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return row | {"default": toml_value(values[row["setting"]])}


def page() -> str:
    """All of it, a table for each group and each method."""
    parts, every = [HEAD.rstrip()], rows()
    groups = dict.fromkeys(row["setting"].rpartition(".")[0] for row in every if row["of"] == "every run")
    for group in groups:
        inside = [row for row in every if row["of"] == "every run" and row["setting"].rpartition(".")[0] == group]
        parts += [f"## {group or 'The run'}", about(group), table(inside)]
    parts += ["## Methods"]
    for name in dict.fromkeys(row["of"] for row in every if row["of"] != "every run"):
        parts += [f"### {name}", table([row for row in every if row["of"] == name])]
    return "\n\n".join(part for part in parts if part) + "\n"


def about(group: str) -> str:
    return ((SECTIONS[group] if group else RunConfig).__doc__ or "").strip()


def table(inside: Sequence[Mapping[str, Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in inside:
        shown = "the dataset's" if row["default"] is None else f"`{row['default']}`"
        lines.append([f"`{row['setting']}`", row["type"], shown, row["allowed"], row["help"]])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def update(path: Path) -> None:
    """Writes the page anew; a file that is something else is left alone."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(TITLE):
        raise DataError(f"{path} is no page of settings (it does not begin with '{TITLE}'); give another file")
    write_text(path, page())
