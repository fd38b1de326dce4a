"""Finds methods, datasets and encoders by name: a name is a module of this package or an entry point of another.

`find("methods", "promax")` imports `profcil.methods.promax`. Another package adds a plug-in by an entry point in the
group `profcil.methods`, `profcil.data` or `profcil.encoders`. A plug-in is checked when it is loaded. A broken plug-in
raises `BrokenPlugin` where it is asked for and does not affect the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from profcil.errors import BrokenPlugin, unknown

# Folder and entry-point group -> what a message calls one of its modules.
GROUPS = {"methods": "method", "data": "dataset", "encoders": "encoder"}
# Modules in those folders that are helpers: they cannot be chosen by name.
HELPERS = {
    "methods": {"base"},
    "data": {"bundle", "files", "fetch", "input_format", "loading", "unpickle"},
    "encoders": set(),
}
UNLISTED = ("data", "own")  # found by name, but not listed: it is whatever `--data PATH` holds
# Attributes that a module must define.
REQUIRED = {"methods": ("METHOD",), "data": ("FACTS", "load"), "encoders": ("build",)}


def names(group: str) -> list[str]:
    """All names of a group, sorted. Nothing is imported."""
    return sorted(builtin(group) | plugins(group).keys())


def builtin(group: str) -> set[str]:
    """The names of this package's own modules."""
    folder = Path(__file__).parent / group
    modules = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")}
    return modules - HELPERS[group]


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of other packages by name. Cached: scanning all installed packages is slow."""
    return {entry.name: entry for entry in entry_points(group=f"profcil.{group}")}


def find(group: str, name: str) -> ModuleType:
    """The module of a name. An unknown name is an error that lists the nearest names."""
    if name in plugins(group):
        return load_plugin(group, name)
    if name not in builtin(group) and (group, name) != UNLISTED:
        raise unknown(GROUPS[group], name, names(group))
    return importlib.import_module(f"profcil.{group}.{name}")


def usable(group: str) -> dict[str, ModuleType]:
    """All modules of a group by name, without the broken plug-ins."""
    broken = broken_plugins(group)
    return {name: find(group, name) for name in names(group) if name not in broken}


def broken_plugins(group: str) -> dict[str, str]:
    """The plug-ins that cannot be used, with the reason."""
    reasons = {}
    for name in sorted(plugins(group)):
        try:
            find(group, name)
        except BrokenPlugin as error:
            reasons[name] = str(error)
    return reasons


def load_plugin(group: str, name: str) -> ModuleType:
    """The checked module of a plug-in."""
    plugin = describe(group, name)
    if name in builtin(group):
        raise BrokenPlugin(f"{plugin} has the name of a built-in {GROUPS[group]}; give its entry point another name")
    try:
        module = plugins(group)[name].load()
    except Exception as error:  # importing foreign code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenPlugin(f"{plugin} cannot be imported ({reason}); repair that package or uninstall it") from error
    if reason := check_attributes(group, module) or CHECKS[group](name, module):
        raise BrokenPlugin(f"{plugin} {reason}")
    return module


def describe(group: str, name: str) -> str:
    """A plug-in for a message: its name, entry point and package."""
    entry = plugins(group)[name]
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
    return f"{GROUPS[group]} '{name}' (entry point {entry.value} of {package})"


@cache
def origin(group: str, name: str) -> dict[str, str]:
    """Package, version and source hash of a plug-in: what its results depend on besides settings and data.

    Empty for a built-in module, which profcil's version stands for.
    """
    if name not in plugins(group):
        return {}
    entry = plugins(group)[name]
    package = entry.dist.name if entry.dist else ""
    version = entry.dist.version if entry.dist else ""
    source = hashlib.blake2b(digest_size=16)
    for path in source_files(entry.module):
        source.update(path.read_bytes())
    return {"package": package, "version": version, "source": source.hexdigest()}


def source_files(module: str) -> list[Path]:
    """The file of a module, or all files of a package."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return []
    file = Path(spec.origin)
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


# Each check returns what is wrong with a plug-in as the end of a sentence, or an empty text.


def check_attributes(group: str, module: Any) -> str:
    """Checks that an entry point names a module with the required attributes."""
    required = REQUIRED[group]
    missing = [attribute for attribute in required if not hasattr(module, attribute)]
    if isinstance(module, ModuleType) and not missing:
        return ""
    kind = "a module" if isinstance(module, ModuleType) else "not a module"
    expected = f"the entry point must name a module that defines {' and '.join(required)}"
    return f"is {kind} without {' and '.join(missing or required)}; {expected}"


def check_method(name: str, module: Any) -> str:
    """Checks `METHOD`: a class derived from Method, whose Params extend those of its parent."""
    from profcil.methods.base import Method

    method = module.METHOD
    if not (isinstance(method, type) and issubclass(method, Method)):
        return "has a METHOD that is not a method class; derive it from profcil.extend.Method"
    parent = next(c for c in method.__mro__ if c.__module__.partition(".")[0] == "profcil")
    expected = parent.Params  # type: ignore[attr-defined]
    params: Any = method.Params
    if not (isinstance(params, type) and issubclass(params, expected)):
        given = getattr(params, "__name__", params)
        advice = f"derive them from {expected.__module__}.{expected.__name__}"
        return f"has Params ({given}) that lack the settings of {parent.__name__}; {advice}"
    fields = {f.name for f in dataclasses.fields(params)}
    if ignored := sorted(vars(params).get("__annotations__", {}).keys() - fields):
        return f"has Params whose {', '.join(ignored)} is no setting; put @dataclass(frozen=True) on {params.__name__}"
    return ""


def check_dataset(name: str, module: Any) -> str:
    """Checks `FACTS`, `RECIPE` and `load`."""
    from profcil.data.bundle import Facts

    if not isinstance(module.FACTS, Facts):
        return "has FACTS of another type; make them with profcil.extend.Facts"
    if module.FACTS.name != name:
        return f"has the name '{module.FACTS.name}' in its FACTS; both names must be the same"
    if not isinstance(getattr(module, "RECIPE", {}), dict):
        return "has a RECIPE that is not a dict; write it as the tables of a recipe"
    return "" if callable(module.load) else "has a load that cannot be called; write load(root, seed=0) -> Bundle"


def check_encoder(name: str, module: Any) -> str:
    """Checks `build`."""
    return "" if callable(module.build) else "has a build that cannot be called; make it a function"


CHECKS = {"methods": check_method, "data": check_dataset, "encoders": check_encoder}
