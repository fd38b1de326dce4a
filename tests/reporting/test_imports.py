"""What reporting, runs and studies may import: never the command line, and torch only when it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import profcil

ROOT = Path(profcil.__file__).parent
WITH_TORCH = (
    "profcil.runs.models.export",  # what it exports is a torch module; only `profcil export` imports it
    "profcil.runs.models.input_files",  # it reads files into tensors; only `predict` and `eval` import it
)
MODULES = sorted(path for package in ("reporting", "runs", "studies") for path in (ROOT / package).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """The modules that a file imports, also inside its functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_module_imports_the_command_line():
    for path in MODULES:
        assert not [name for name in imported_names(path) if name.startswith("profcil.cli")], path


def test_runs_and_studies_do_not_import_reporting():
    for path in MODULES:
        if "reporting" not in path.relative_to(ROOT).parts:
            assert not [name for name in imported_names(path) if name.startswith("profcil.reporting")], path


def test_importing_the_modules_does_not_import_torch():
    names = [".".join(("profcil", *path.relative_to(ROOT).with_suffix("").parts)) for path in MODULES]
    names = [name for name in names if name not in WITH_TORCH]
    code = (
        f"import sys, {', '.join(name.removesuffix('.__init__') for name in names)}; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
