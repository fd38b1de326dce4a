"""List methods, datasets, recipes, presets, studies, encoders, loggers or settings.

`list settings` shows the settings of every run and of all methods. --method shows one method only, and --dataset the
values of a run on that dataset instead of the defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, json_flag, print_json
from profcil.errors import ConfigError, unknown

SPARED = ("of", "type", "allowed", "with_setting")  # columns that are left out first on a narrow terminal


def add(parser: Parser) -> None:
    parser.add_argument(
        "kind", metavar="KIND", help="methods, datasets, recipes, presets, studies, encoders, loggers or settings"
    )
    parser.add_argument("--page", metavar="FILE", help="methods, settings: write the documentation page to FILE")
    parser.add_argument("--method", help="settings: those of this method and of every run")
    parser.add_argument("--dataset", help="settings: with the values of a run on this dataset")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.tables import text_table

    if args.kind not in KINDS:
        raise unknown("kind", args.kind, KINDS)
    chosen = {name: value for name in ("method", "dataset") if (value := getattr(args, name)) is not None}
    if chosen and (args.kind != "settings" or args.page):
        given = "--page" if args.page else args.kind
        raise ConfigError(f"--{next(iter(chosen))} was given with {given}, it is for `list settings`; leave it out")
    if args.page:
        return write_page(args.kind, Path(args.page))
    rows = KINDS[args.kind](**chosen)
    if args.json:
        print_json(rows)
    else:
        columns = list(rows[0])
        cells = [[cell_text(row[key]) for key in columns] for row in rows]
        print(text_table(columns, cells, SPARED))
    return 0


def write_page(kind: str, path: Path) -> int:
    from profcil.reporting import methods, settings

    pages = {"methods": methods.update, "settings": settings.update}
    if kind not in pages:
        raise ConfigError(f"--page was given with {kind}, allowed is {' or '.join(pages)}; leave --page out")
    pages[kind](path)
    print(f"written: {path}")
    return 0


def methods() -> list[dict[str, Any]]:
    from profcil import registry

    rows = [
        {"name": name, "title": title(module), "modalities": sorted(module.METHOD.modalities)}
        for name, module in registry.usable("methods").items()
    ]
    return with_broken("methods", rows)


def datasets() -> list[dict[str, Any]]:
    from profcil import registry

    facts = [module.FACTS for module in registry.usable("data").values()]
    rows = [
        {"name": f.name, "title": f.title, "modality": f.modality, "classes": f.classes, "licence": f.licence}
        for f in facts
    ]
    return with_broken("data", rows)


def encoders() -> list[dict[str, Any]]:
    from profcil import registry

    rows = [{"name": name, "title": title(module)} for name, module in registry.usable("encoders").items()]
    return with_broken("encoders", rows)


def loggers() -> list[dict[str, Any]]:
    from profcil import registry

    rows = [{"name": name, "title": title(module)} for name, module in registry.usable("loggers").items()]
    return with_broken("loggers", rows)


def with_broken(group: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and below them one row for each broken plug-in with the reason."""
    from profcil import registry

    empty = {key: [] if isinstance(value, list) else "" for key, value in rows[0].items()}
    broken = registry.broken_plugins(group)
    rows = list(rows)
    for name, why in broken.items():
        rows.append(empty | {"name": name, "title": f"broken: {why}", "broken": True})
    return rows


def studies() -> list[dict[str, Any]]:
    from profcil.studies.definition import list_all_cells, load_studies, study_names, study_values

    rows = []
    for name in study_names():
        cells = list_all_cells(load_studies(name))
        rows.append({"name": name, "title": study_values(name)["title"], "runs": len(cells)})
    return rows


def recipes() -> list[dict[str, Any]]:
    """Every recipe with its names for each heterogeneity setting and its values."""
    from profcil import registry, resolve

    rows = []
    for name in resolve.recipe_names():
        path = resolve.RECIPES / f"{name}.toml"
        if path.exists():
            heading = path.read_text(encoding="utf-8").splitlines()[0]
        else:
            heading = title(registry.find("data", name))
        values = resolve.recipe_of(name)
        values.pop("dataset", None)
        with_setting = [f"{name}-{setting}" for setting in resolve.SETTINGS]
        rows.append({"name": name, "title": heading.lstrip("# "), "with_setting": with_setting, "sets": values})
    return rows


def presets() -> list[dict[str, Any]]:
    """Every preset with the methods and the datasets that it has settings for."""
    from profcil import resolve

    rows = []
    for name in resolve.preset_names():
        values = resolve.load_toml(resolve.PRESETS / f"{name}.toml")
        datasets = values.get("datasets", {})
        tables = [values.get("methods", {}), *(table.get("methods", {}) for table in datasets.values())]
        for_methods = dict.fromkeys(method for table in tables for method in table)
        for_datasets = list(datasets) if not values.get("methods") else ["all"]
        rows.append({"name": name, "title": values["title"], "methods": list(for_methods), "datasets": for_datasets})
    return rows


def settings(method: str | None = None, dataset: str | None = None) -> list[dict[str, Any]]:
    from profcil.reporting.settings import list_settings

    rows = list_settings(method, dataset)
    return [{key: "" if value is None else value for key, value in row.items()} for row in rows]


KINDS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "methods": methods,
    "datasets": datasets,
    "recipes": recipes,
    "presets": presets,
    "studies": studies,
    "encoders": encoders,
    "loggers": loggers,
    "settings": settings,
}


def title(module: Any) -> str:
    """The first line of a module's docstring."""
    return (module.__doc__ or "").strip().partition("\n")[0]


def cell_text(value: Any) -> str:
    """A table cell: a list with commas, a recipe as section.key=value."""
    if isinstance(value, list):
        return ", ".join(value)
    if not isinstance(value, dict):
        return str(value)
    parts = []
    for section, table in value.items():
        if isinstance(table, dict):
            parts += [f"{section}.{key}={each}" for key, each in table.items() if not isinstance(each, dict)]
    return " ".join(parts)
