"""Show what is installed on this machine, what is missing and how to install it."""

from __future__ import annotations

import argparse
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from profcil import __version__
from profcil.cli.parser import Parser, data_dir, data_root, json_flag, print_json


def add(parser: Parser) -> None:
    data_dir(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """The exit status is 1 if a required package is missing."""
    found = examine(data_root(args))
    if args.json:
        print_json(found)
    else:
        print(describe(found))
    return int(any(not p["version"] and not p["extra"] for p in found["packages"]))


def examine(root: Path) -> dict[str, Any]:
    """Everything that the report contains."""
    required_and_extra = packages()
    missing = [
        f"{p['name']} is not installed; install it with `{p['get']}`" for p in required_and_extra if not p["version"]
    ]
    usable = all(p["version"] for p in required_and_extra if not p["extra"])
    data = datasets(root) if usable else []
    incomplete = ", ".join(row["dataset"] for row in data if row["complete"] is False)
    if incomplete:
        missing.append(f"incomplete in {root}: {incomplete}; `profcil data status` shows how to get them")
    return {
        "profcil": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "gpu": gpus() if usable else [],
        "acceleration": acceleration() if usable else {},
        "packages": required_and_extra,
        "cache": cache() if usable else None,
        "data_dir": str(root),
        "data": data,
        "missing": missing,
    }


def packages() -> list[dict[str, Any]]:
    """The requirements in the metadata of profcil, with their extras; those for developers are left out."""
    try:
        lines = metadata.requires("profcil") or []
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return []
    rows = []
    for line in lines:
        name = re.match(r"[\w.-]+", line)[0]  # type: ignore[index]
        extra = next(iter(re.findall(r"extra == ['\"]([\w-]+)['\"]", line)), None)
        get = f"pip install 'profcil[{extra}]'" if extra else f"pip install {name}"
        if extra != "dev":
            rows.append({"name": name, "version": version(name), "extra": extra, "get": get})
    return rows


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def acceleration() -> dict[str, Any]:
    """What the accelerated path can use here, and whether its self-checks passed."""
    from profcil.engine.executor import examine_machine

    return examine_machine()


def acceleration_lines(found: dict[str, Any]) -> list[str]:
    if not found:
        return ["accel    absent; all runs take the reference path"]
    checks = ", ".join(f"{name} {outcome}" for name, outcome in found["checks"].items())
    return [
        f"compiler {found['compiler'] or 'none; TorchScript is used instead, which takes longer'}",
        f"triton   {found['triton'] or 'none; needed for fast runs on a GPU only'}",
        f"checks   {checks}",
    ]


def cache() -> dict[str, Any]:
    """The cache folder, its size and whether it is writable. If it is not, warm-ups are computed again."""
    from profcil.io.cache_folder import cache_folder

    path = cache_folder()
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    files: list[Path] = []
    for folder, _, names in os.walk(path):  # skips unreadable folders
        files += [Path(folder) / name for name in names]
    size = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return {"path": str(path), "bytes": size, "writable": os.access(existing, os.W_OK | os.X_OK)}


def datasets(root: Path) -> list[dict[str, Any]]:
    from profcil.data import loading

    return loading.status(root)


def describe(report: dict[str, Any]) -> str:
    """The report as text."""
    from profcil.cli.data import status_text

    lines = [f"{name:<8} {report[name]}" for name in ("profcil", "python", "machine")]
    lines += [f"gpu      {', '.join(report['gpu']) or 'none usable by torch'}"]
    lines += acceleration_lines(report["acceleration"])
    if cached := report["cache"]:
        note = "" if cached["writable"] else ", not writable"
        lines += [f"cache    {cached['path']}, {cached['bytes'] / 1e6:.1f} MB{note}"]
    lines.append("")
    for package in report["packages"]:
        lines.append(f"{package['name']:<16} {package['version'] or 'missing'}")
    if report["data"]:
        lines += ["", f"data in {report['data_dir']}:", status_text(report["data"])]
    lines += ["", *(report["missing"] or ["nothing is missing"])]
    return "\n".join(lines)
