"""The only registry: a name is a module in a folder, or an entry point of another package.

`find("methods", "promax")` imports `profcil.methods.promax`. A third-party package adds a room's occupant with an
entry point in the group `profcil.methods`, `profcil.data` or `profcil.encoders`; nothing is edited here. Such a guest
is looked at when it comes in: one that cannot be used is told in one sentence, and is in nobody else's way.
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

from profcil.errors import Broken, unknown

ROOMS = {"methods": "method", "data": "dataset", "encoders": "encoder"}
# Files in those folders that are furniture, not occupants.
FURNITURE = {
    "methods": {"base"},
    "data": {"bundle", "files", "fetch", "unpickle", "loading"},
    "encoders": set(),
}
# What a module must define to be an occupant.
DEFINES = {"methods": ("METHOD",), "data": ("FACTS", "load"), "encoders": ("build",)}


def names(room: str) -> list[str]:
    """What can be named in a room, without importing any of it."""
    return sorted(own(room) | guests(room).keys())


def own(room: str) -> set[str]:
    """What is in the folder."""
    folder = Path(__file__).parent / room
    return {f.stem for f in folder.glob("*.py") if not f.stem.startswith("_")} - FURNITURE[room]


@cache
def guests(room: str) -> dict[str, EntryPoint]:
    """What other packages bring; looking through all installed packages takes long enough to do it once."""
    return {e.name: e for e in entry_points(group=f"profcil.{room}")}


def find(room: str, name: str) -> ModuleType:
    """The module behind a name; an unknown name is an error that lists the nearest ones."""
    if name in guests(room):
        return welcome(room, name)
    if name not in own(room):
        raise unknown(ROOMS[room], name, names(room))
    return importlib.import_module(f"profcil.{room}.{name}")


def usable(room: str) -> dict[str, ModuleType]:
    """Everything in a room by name, without the guests that are broken."""
    lame = broken(room)
    return {name: find(room, name) for name in names(room) if name not in lame}


def broken(room: str) -> dict[str, str]:
    """The guests that cannot be used, and why."""
    out = {}
    for name in sorted(guests(room)):
        try:
            find(room, name)
        except Broken as error:
            out[name] = str(error)
    return out


def welcome(room: str, name: str) -> ModuleType:
    """A guest's module, or a sentence on what is wrong with it."""
    who = spoken(room, name)
    if name in own(room):
        raise Broken(f"{who} has the name of one of profcil's own; give its entry point another name")
    try:
        module = guests(room)[name].load()
    except Exception as error:  # whatever a stranger's module does while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Broken(f"{who} cannot be imported ({reason}); repair that package or uninstall it") from error
    lacking = [attribute for attribute in DEFINES[room] if not hasattr(module, attribute)]
    if not isinstance(module, ModuleType) or lacking:
        kind = "a module" if isinstance(module, ModuleType) else "not a module"
        expected = f"the entry point must name a module that defines {' and '.join(DEFINES[room])}"
        raise Broken(f"{who} is {kind} without {' and '.join(lacking or DEFINES[room])}; {expected}")
    if reason := CHECKS[room](name, module):
        raise Broken(f"{who} {reason}")
    return module


def spoken(room: str, name: str) -> str:
    """A guest by its name, its entry point and the package it comes with."""
    entry = guests(room)[name]
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
    return f"{ROOMS[room]} '{name}' (entry point {entry.value} of {package})"


@cache
def origin(room: str, name: str) -> dict[str, str]:
    """What a guest's results depend on besides settings and data: package, version and a hash of the module's source.
    Empty for profcil's own, which its version stands for."""
    if name not in guests(room):
        return {}
    entry, total = guests(room)[name], hashlib.blake2b(digest_size=16)
    spec = importlib.util.find_spec(entry.module)
    file = Path(spec.origin) if spec and spec.origin else None
    for path in sorted(file.parent.rglob("*.py")) if file and file.name == "__init__.py" else [file] if file else []:
        total.update(path.read_bytes())
    package, version = (entry.dist.name, entry.dist.version) if entry.dist else ("", "")
    return {"package": package, "version": version, "source": total.hexdigest()}


def check_method(name: str, module: Any) -> str:
    """What is wrong with a guest's method, as the end of a sentence; empty where nothing is."""
    from profcil.methods.base import Method

    method = module.METHOD
    if not (isinstance(method, type) and issubclass(method, Method)):
        return "has a METHOD that is no class; derive one from profcil.methods.base.Method"
    parent = next(c for c in method.__mro__ if c.__module__.partition(".")[0] == "profcil")
    params: Any = method.Params
    if not (isinstance(params, type) and issubclass(params, parent.Params)):  # type: ignore[attr-defined]
        wanted = parent.Params  # type: ignore[attr-defined]
        given = getattr(params, "__name__", params)
        return f"has Params ({given}) that lack the settings of {parent.__name__}; derive them from " + (
            f"{wanted.__module__}.{wanted.__name__}"
        )
    fields = {f.name for f in dataclasses.fields(params)}
    if forgotten := sorted(vars(params).get("__annotations__", {}).keys() - fields):
        return (
            f"has Params whose {', '.join(forgotten)} is no setting; put @dataclass(frozen=True) on {params.__name__}"
        )
    return ""


def check_dataset(name: str, module: Any) -> str:
    """The same for a dataset."""
    from profcil.data.bundle import Facts

    if not isinstance(module.FACTS, Facts):
        return "has FACTS that are no profcil.data.bundle.Facts"
    if module.FACTS.name != name:
        return f"calls itself '{module.FACTS.name}' in its FACTS; both names must be the same"
    if not isinstance(getattr(module, "RECIPE", {}), dict):
        return "has a RECIPE that is no dict; write it as the tables of a recipe"
    return "" if callable(module.load) else "has a load that cannot be called; write load(root, seed=0) -> Bundle"


def check_encoder(name: str, module: Any) -> str:
    """The same for an encoder."""
    return "" if callable(module.build) else "has a build that cannot be called"


CHECKS = {"methods": check_method, "data": check_dataset, "encoders": check_encoder}
