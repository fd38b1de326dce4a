"""Which package may import which, and that the package works without the folder accel/."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch

import profcil
from profcil.io.atomic_files import read_tensors

ROOT = Path(profcil.__file__).parent
TESTS = Path(__file__).parent
PACKAGES = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py")))
COMMANDS = ("bench", "cli", "deploy", "live", "reporting", "studies")  # the packages that use the engine from outside

# What a package must not import. `accel` has a test of its own.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "protocol": (*(p for p in PACKAGES if p != "protocol"), "api", "extend", "registry", "resolve"),
    "resolve": ("encoders", "model", "memory", "methods", "engine", "runs", "diagnostics", *COMMANDS),
    "data": ("encoders", "model", "memory", "methods", "engine", "runs", "diagnostics", *COMMANDS),
    "model": ("encoders", "memory", "methods", "engine", "runs", "diagnostics", *COMMANDS),
    "encoders": ("memory", "methods", "engine", "runs", "diagnostics", *COMMANDS),
    "memory": ("encoders", "methods", "engine", "runs", "diagnostics", *COMMANDS),
    "metrics": ("encoders", "model", "memory", "methods", "engine", "runs", "diagnostics", *COMMANDS),
    "privacy": ("methods", "encoders", "contract", "runs", "diagnostics", *COMMANDS),
    "engine": ("methods", "encoders", "contract", "diagnostics", *COMMANDS),
    "methods": ("contract", "runs", "diagnostics", *COMMANDS),
    "accel": ("methods", "contract", "runs", "diagnostics", *COMMANDS),
    "robust": ("methods", "encoders", "data", "accel", "contract", "runs", "diagnostics", *COMMANDS),
    "runs": ("bench", "cli", "deploy", "live", "reporting"),
    "studies": ("bench", "cli", "deploy", "live", "reporting"),
    "reporting": ("bench", "cli", "deploy", "live", "engine", "methods"),
    "diagnostics": ("bench", "cli", "deploy", "live", "reporting"),
    "loggers": ("methods", "accel", "contract", "diagnostics", *COMMANDS),
    "live": ("bench", "cli", "engine", "methods", "accel", "contract"),
}

# Imports that FORBIDDEN does not allow and that exist nevertheless, each with its reason. None may be unused.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("profcil.engine.arrivals", "methods"): "the type of a method in signatures",
    ("profcil.engine.buffered_round", "methods"): "the type of a method in signatures",
    ("profcil.engine.client_exchange", "methods"): "the type of a method in signatures",
    ("profcil.engine.dictionary", "methods"): "the search for a dictionary is written as a method",
    ("profcil.engine.early_stop", "methods"): "the type of a method in signatures",
    ("profcil.engine.evaluation", "methods"): "the type of a method in signatures",
    ("profcil.engine.loop", "methods"): "the type of a method in signatures",
    ("profcil.engine.warmup", "methods"): "the warm-up is written as a method",
}


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(("profcil", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def imported_names(tree: ast.AST) -> set[str]:
    """Everything that a module imports, also inside functions and for type checks only."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
IMPORTS = {module: imported_names(tree) for module, tree in TREES.items()}


def package_of(name: str) -> str:
    """The first part below profcil; empty for other libraries."""
    top, _, rest = name.partition(".")
    return rest.partition(".")[0] if top == "profcil" else ""


def imported_packages(module: str) -> set[str]:
    return {package_of(name) for name in IMPORTS[module]}


# -- directions -------------------------------------------------------------------------------------------------------


def test_only_the_executor_and_the_bench_import_accel():
    found = {m for m in IMPORTS if package_of(m) != "accel" and "accel" in imported_packages(m)}
    assert {m for m in found if package_of(m) != "bench"} == {"profcil.engine.executor"}


def test_no_other_module_names_accel_in_a_string():
    """As `import_module` would need it."""
    allowed = {"profcil.engine.executor"}
    found = set()
    for module, tree in TREES.items():
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if any(text.startswith("profcil.accel") for text in texts):
            found.add(module)
    assert {m for m in found if package_of(m) != "accel"} <= allowed


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_it_may(package):
    modules = [m for m in IMPORTS if package_of(m) == package]
    assert modules
    for module in modules:
        wrong = imported_packages(module) & set(FORBIDDEN[package])
        assert not {name for name in wrong if (module, name) not in EXCEPTIONS}, module


def test_the_protocol_imports_no_torch():
    modules = [m for m in IMPORTS if package_of(m) == "protocol"]
    assert not [m for m in modules if any(name.partition(".")[0] == "torch" for name in IMPORTS[m])]


@pytest.mark.parametrize(("side", "other"), [("client", "server"), ("server", "client"), ("sites", "server")])
def test_the_two_sides_of_a_deployment_share_only_messages_and_sites(side, other):
    modules = [m for m in IMPORTS if m.startswith(f"profcil.deploy.{side}.")]
    assert modules
    for module in modules:
        assert not [name for name in IMPORTS[module] if name.startswith(f"profcil.deploy.{other}.")], module


def test_every_exception_is_used():
    for module, package in EXCEPTIONS:
        assert package in FORBIDDEN[package_of(module)]
        assert package in imported_packages(module), f"{module} no longer imports {package}: delete the exception"


def test_every_package_is_known():
    """A new package has to be put into FORBIDDEN, or here."""
    unconstrained = {"bench", "cli", "contract", "deploy", "io"}
    assert set(PACKAGES) == FORBIDDEN.keys() | unconstrained


# -- without the folder accel/ ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_accel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source without accel/."""
    source = tmp_path_factory.mktemp("without accel")
    ignored = shutil.ignore_patterns("accel", "__pycache__")
    shutil.copytree(ROOT, source / "profcil", ignore=ignored)
    assert not (source / "profcil" / "accel").exists()
    return source


def environment(source: Path, cache: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source), "PROFCIL_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}


def results(folder: Path) -> dict[str, Any]:
    """Everything a run computed; without times, and without settings that are meant to differ."""
    about = json.loads((folder / "run.json").read_text())
    facts = ("done", "bytes", "metrics", "plan", "position", "server_memory_bytes", "execution")
    files = {name: (folder / name).read_bytes() for name in ("scores.json", "ledger.csv")}
    return files | {k: about[k] for k in facts}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    return found[0]


def test_without_accel_the_default_is_the_reference(without_accel, tmp_path, monkeypatch):
    """The same bits as with `accelerate = "off"`."""
    command = [sys.executable, str(TESTS / "small_runs.py"), str(tmp_path / "without")]
    done = subprocess.run(command, env=environment(without_accel, tmp_path / "cache"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "another cache"))
    small_runs.run_all(tmp_path / "off", "off")
    for method in small_runs.METHODS:
        absent, off = (tmp_path / name / method for name in ("without", "off"))
        assert results(absent) == results(off)
        assert [e["path"] for e in results(absent)["execution"]] == ["reference"]
        one, other = tensors(absent), tensors(off)
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["methods", "engine", "memory", "contracts"])
def test_the_tests_pass_without_accel(folder, without_accel, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / folder)]
    env = environment(without_accel, tmp_path / "cache")
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
