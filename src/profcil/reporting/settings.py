"""Lists every setting with its type, default, range and help text, and generates docs/settings.md."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.config import describe_range
from profcil.errors import DataError, unknown
from profcil.io.atomic_files import write_text
from profcil.plain_values import describe_type, plain
from profcil.reporting.markdown import markdown_table
from profcil.resolve import SECTIONS, SETTINGS, TOP_LEVEL, RunConfig, resolve, toml_value
from profcil.runs.settings_check import flatten_settings

TITLE = "# Settings"
HEAD = f"""{TITLE}

Written by `profcil list settings --page docs/settings.md` from the dataclasses that hold them. Each setting is a key of
a recipe (TOML). `--set key=value` takes its dotted name, or its last part if that is unique; settings of own data,
of the channel and of clocks are always written in full (`own.label`, `channel.memory`, `clock.mode`). The recipe of a
dataset overrides these defaults: `profcil list settings --dataset NAME --method NAME` shows the values of a run.
"""
COLUMNS = ("setting", "type", "default", "allowed", "what it is")
EVERY_RUN = "every run"
BY_SETTING = {key for values in SETTINGS.values() for key in values}  # stream settings that `setting` determines


def list_settings(method: str | None = None, dataset: str | None = None) -> list[dict[str, Any]]:
    """The settings of every run, then those of one method or of all methods.

    Defaults are TOML values. With a dataset they are the values of a run on it. None means that the dataset's recipe
    must give the value.
    """
    if dataset is not None and dataset not in registry.names("data"):
        raise unknown("dataset", dataset, registry.names("data"))
    names = [method] if method else registry.names("methods")
    classes = {name: registry.find("methods", name).METHOD for name in names}
    common = [*describe_fields(RunConfig, "", EVERY_RUN)]
    for section, cls in SECTIONS.items():
        common += describe_fields(cls, f"{section}.", EVERY_RUN)
    own: list[dict[str, Any]] = []
    for name, cls in classes.items():
        own += describe_fields(cls.Params, "params.", name)
    if dataset is None:
        return [*common, *own]
    values = {name: run_values(dataset, name) for name in names}
    values[EVERY_RUN] = run_values(dataset, method)
    rows = []
    for row in (*common, *own):
        value = values[row["of"]][row["setting"]]
        rows.append(row | {"default": toml_value(value)})
    return rows


def run_values(dataset: str, method: str | None) -> dict[str, Any]:
    """The settings of a run by their dotted names."""
    config = resolve(None, {"dataset": dataset, "method": method})
    values = flatten_settings(plain(config))
    encoder = values["model.encoder"] or registry.find("data", dataset).FACTS.encoder
    return values | {"model.encoder": encoder}


def describe_fields(cls: type, prefix: str, of: str) -> Iterator[dict[str, Any]]:
    """One row for each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if cls is RunConfig and field.name not in TOP_LEVEL:
            continue
        row: dict[str, Any] = {"setting": prefix + field.name, "of": of}
        row["type"] = re.sub(r"\ba ", "", describe_type(hints[field.name]))
        row["default"] = default_text(field, prefix)
        row["allowed"] = allowed_values(field.metadata)
        row["help"] = field.metadata.get("help", "")
        yield row


def default_text(field: dataclasses.Field, prefix: str) -> str | None:
    """The default as TOML; None if there is none."""
    if prefix == "stream." and field.name in BY_SETTING:
        texts = [f"{name} {values[field.name]}" for name, values in SETTINGS.items()]
        return ", ".join(texts)
    if field.default_factory is not dataclasses.MISSING:
        return toml_value(field.default_factory())
    return None if field.default is dataclasses.MISSING else toml_value(field.default)


def allowed_values(rule: Mapping[str, Any]) -> str:
    if rule.get("choices"):
        return ", ".join(str(choice) or '""' for choice in rule["choices"])
    return describe_range(rule.get("low"), rule.get("high"))


def render_page() -> str:
    """The page: a table for each section and each method."""
    rows = list_settings()
    common: dict[str, list[dict[str, Any]]] = {}  # by section
    own: dict[str, list[dict[str, Any]]] = {}  # by method
    for row in rows:
        if row["of"] == EVERY_RUN:
            section, _, _ = row["setting"].rpartition(".")
            common.setdefault(section, []).append(row)
        else:
            own.setdefault(row["of"], []).append(row)
    parts = [HEAD.rstrip()]
    for section, of_section in common.items():
        title = section or "The run"
        parts += [f"## {title}", section_docstring(section), settings_table(of_section)]
    parts.append("## Methods")
    for method, of_method in own.items():
        parts += [f"### {method}", settings_table(of_method)]
    return "\n\n".join(part for part in parts if part) + "\n"


def section_docstring(section: str) -> str:
    cls = SECTIONS[section] if section else RunConfig
    return (cls.__doc__ or "").strip()


def settings_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        default = "the dataset's" if row["default"] is None else f"`{row['default']}`"
        name = f"`{row['setting']}`"
        cells = [name, row["type"], default, row["allowed"], row["help"]]
        body.append([cell.replace("|", "\\|") for cell in cells])
    return markdown_table(COLUMNS, body)


def update(path: Path) -> None:
    """Rewrites the page; refuses a file that is something else."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(TITLE):
        raise DataError(f"{path} is not a page of settings (it does not begin with '{TITLE}'); give another file")
    write_text(path, render_page())
