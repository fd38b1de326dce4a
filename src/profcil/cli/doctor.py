"""Say what this machine has, what is missing and how to get it."""

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
    """Status 1 where something is missing that no run can do without."""
    found = examine(data_root(args))
    if args.json:
        print_json(found)
    else:
        print(told(found))
    return int(any(not p["version"] and not p["extra"] for p in found["packages"]))


def examine(root: Path) -> dict[str, Any]:
    parts = packages()
    lacking = [f"{p['name']} is not installed; get it with `{p['get']}`" for p in parts if not p["version"]]
    able = all(p["version"] for p in parts if not p["extra"])
    data = datasets(root) if able else []
    absent = ", ".join(r["dataset"] for r in data if r["complete"] is False)
    if absent:
        lacking.append(f"not complete under {root}: {absent}; `profcil data status` says how to get them")
    return {
        "profcil": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "gpu": gpus() if able else [],
        "acceleration": acceleration() if able else {},
        "packages": parts,
        "cache": cache() if able else None,
        "data_dir": str(root),
        "data": data,
        "missing": lacking,
    }


def packages() -> list[dict[str, Any]]:
    """What the package's own metadata asks for, with the extra that brings it; tools for developers are left out."""
    try:
        lines = metadata.requires("profcil") or []
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
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

    return (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )


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
    """The folder of the shared warm-ups; one that cannot be written costs time, nothing else."""
    from profcil.io.cache_folder import cache_folder

    path = cache_folder()
    nearest = next(p for p in (path, *path.parents) if os.path.exists(p))
    kept = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]  # what may be looked into
    size = sum(os.path.getsize(f) for f in kept if os.path.isfile(f))
    return {"path": str(path), "bytes": size, "writable": os.access(nearest, os.W_OK | os.X_OK)}


def datasets(root: Path) -> list[dict[str, Any]]:
    from profcil.data import loading

    return loading.status(root)


def told(found: dict[str, Any]) -> str:
    from profcil.cli.data import status_text

    lines = [f"{name:<8} {found[name]}" for name in ("profcil", "python", "machine")]
    lines += [f"gpu      {', '.join(found['gpu']) or 'none that torch can use'}"]
    lines += acceleration_lines(found["acceleration"])
    if kept := found["cache"]:
        lines += [
            f"cache    {kept['path']}, {kept['bytes'] / 1e6:.1f} MB{'' if kept['writable'] else ', not writable'}"
        ]
    lines += ["", *(f"{p['name']:<16} {p['version'] or 'missing'}" for p in found["packages"])]
    lines += ["", f"data in {found['data_dir']}:", status_text(found["data"])] if found["data"] else []
    lines += ["", *(found["missing"] or ["nothing is missing"])]
    return "\n".join(lines)
