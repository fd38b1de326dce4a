"""The lock has every dependency with hashes, and agrees with the constraints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.append(str(Path(__file__).parent))
from pins import entries, with_pins

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


NOT_INSTALLED = ("docs", "mlflow", "wandb")  # extras that `make demo` and `make test` do not need


def locked_here() -> dict[str, Requirement]:
    """The locked packages of this Python and system, by name."""
    found = [Requirement(line) for lines in entries(LOCK).values() for line in lines]
    return {canonicalize_name(r.name): r for r in found if r.marker is None or r.marker.evaluate()}


def test_the_constraints_have_every_locked_version():
    assert with_pins(CONSTRAINTS, LOCK) == CONSTRAINTS
    assert entries("a==1 \\\n    --hash=x\nb==2 ; python_version < '3.12' \\\n") == {
        "a": ["a==1"],
        "b": ["b==2 ; python_version < '3.12'"],
    }


def test_every_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in NOT_INSTALLED]
    needed = {
        canonicalize_name(Requirement(line).name) for lines in [project["dependencies"], *extras] for line in lines
    }
    assert needed - locked_here().keys() == {"torch"}


def test_every_locked_package_has_hashes():
    parts = re.split(r"\n(?=[a-z])", LOCK[LOCK.index("\n" + next(iter(entries(LOCK)))) :].strip())
    assert len(parts) == sum(map(len, entries(LOCK).values()))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", part) for part in parts)


def test_nothing_for_gpus_is_locked():
    assert not [name for name in entries(LOCK) if name.startswith(("nvidia", "cuda", "triton", "torch=="))]


def test_the_bill_of_materials_names_what_is_installed():
    found = json.loads(subprocess.check_output([sys.executable, Path(__file__).parent / "sbom.py"]))
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    components = {c["name"]: c for c in found["components"]}
    assert components["numpy"]["purl"] == f"pkg:pypi/numpy@{version('numpy')}"
    assert {"torch", "safetensors", "python"} <= components.keys()
