"""Prints a software bill of materials of the environment it runs in: CycloneDX 1.6 as JSON."""

from __future__ import annotations

import json
import sys
from importlib.metadata import Distribution, distributions
from typing import Any


def component(package: Distribution) -> dict[str, Any]:
    """A package with its version, its address in the registry of Python packages, and its licence if it names one."""
    name = package.name.lower().replace("_", "-")
    found: dict[str, Any] = {"type": "library", "name": name, "version": package.version}
    found["purl"] = found["bom-ref"] = f"pkg:pypi/{name}@{package.version}"
    licence = package.metadata.get("License-Expression")
    if licence:
        found["licenses"] = [{"expression": licence}]
    return found


def bill() -> dict[str, Any]:
    packages = {package.name.lower().replace("_", "-"): component(package) for package in distributions()}
    about = packages.pop("profcil", {"type": "application", "name": "profcil"})
    python = {"type": "platform", "name": "python", "version": sys.version.split()[0]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**about, "type": "application"}},
        "components": [python, *(packages[name] for name in sorted(packages))],
    }


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
