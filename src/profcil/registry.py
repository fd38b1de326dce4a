"""Finds methods, datasets, encoders and loggers by name: a module of this package or an entry point of another.

`find("methods", "promax")` imports `profcil.methods.promax`. Another package adds a plug-in by an entry point in the
group `profcil.methods`, `profcil.data`, `profcil.encoders` or `profcil.loggers`. A plug-in is checked when it is
loaded. A broken plug-in raises `BrokenPlugin` where it is asked for and does not affect the others. A method may also
be a file (`mine.py`) or a class that was given from Python; neither is listed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from profcil.errors import BrokenPlugin, ConfigError, unknown
from profcil.plugin_errors import as_broken_plugin

# Folder and entry-point group -> what a message calls one of its modules.
GROUPS = {"methods": "method", "data": "dataset", "encoders": "encoder", "loggers": "logger"}
# Modules in those folders that are helpers: they cannot be chosen by name.
HELPERS = {
    "methods": {"base"},
    "data": {"bundle", "files", "fetch", "input_format", "loading", "unpickle"},
    "encoders": set(),
    "loggers": {"base", "observer", "values"},
}
UNLISTED = ("data", "own")  # found by name, but not listed: it is whatever `--data PATH` holds
FILE_MODULE = "profcil_file_"  # the beginning of the module name of a method in a file
GIVEN_METHODS: dict[str, ModuleType] = {}  # classes that were given from Python, by name
# Attributes that a module must define.
REQUIRED = {"methods": ("METHOD",), "data": ("FACTS", "load"), "encoders": ("build",), "loggers": ("LOGGER",)}


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
    if group == "methods" and is_file_name(name):
        return load_file(Path(name))
    if group == "methods" and name in GIVEN_METHODS:
        return GIVEN_METHODS[name]
    if name in plugins(group):
        return load_plugin(group, name)
    if name not in builtin(group) and (group, name) != UNLISTED:
        raise unknown(GROUPS[group], name, names(group))
    return importlib.import_module(f"profcil.{group}.{name}")


def is_file_name(name: str) -> bool:
    """Whether the name of a method is the path of a Python file."""
    return name.endswith(".py")


def short_name(name: str) -> str:
    """The name of a method for tables and folders: that of a file is its name without the path."""
    return Path(name).stem if is_file_name(name) else name


def load_file(path: Path) -> ModuleType:
    """The checked module of a method in a file of its own. It is executed anew if it has changed."""
    if not path.is_file():
        raise ConfigError(f"method file {path} does not exist; give the path of a Python file that defines METHOD")
    return execute_file(str(path.absolute()), digest_of([path]))


@cache
def execute_file(path: str, digest: str) -> ModuleType:
    name = f"{FILE_MODULE}{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    with as_broken_plugin(f"method file {path} cannot be executed", "correct it"):
        spec.loader.exec_module(module)
        if reason := check_attributes("methods", module) or check_method(path, module):
            raise BrokenPlugin(f"method file {path} {reason}")
    return module


def give_method(method: type) -> str:
    """Makes a method class that was given from Python known by name, and returns the name."""
    for name in names("methods"):
        if name not in broken_plugins("methods") and find("methods", name).METHOD is method:
            return name
    name = getattr(method, "__name__", "method").lower()
    if name in names("methods"):
        raise ConfigError(f"the class {method.__name__} has the name of the method '{name}'; rename the class")
    module = ModuleType(name)
    module.METHOD = method  # type: ignore[attr-defined]
    if reason := check_method(name, module):
        raise BrokenPlugin(f"method {name} {reason}")
    GIVEN_METHODS[name] = module
    return name


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


def is_plugin_module(module: str) -> bool:
    """Whether a module is a method in a file, or belongs to the package of a plug-in."""
    packages = {entry.module.partition(".")[0] for group in GROUPS for entry in plugins(group).values()}
    return module.startswith(FILE_MODULE) or module.partition(".")[0] in packages


def load_plugin(group: str, name: str) -> ModuleType:
    """The checked module of a plug-in."""
    plugin = describe(group, name)
    if name in builtin(group):
        raise BrokenPlugin(f"{plugin} has the name of a built-in {GROUPS[group]}; give its entry point another name")
    with as_broken_plugin(f"{plugin} cannot be imported", "repair that package or uninstall it"):
        module = plugins(group)[name].load()
        if reason := check_attributes(group, module) or CHECKS[group](name, module):
            raise BrokenPlugin(f"{plugin} {reason}")
    return module


def describe(group: str, name: str) -> str:
    """A plug-in for a message: its name, entry point and package."""
    entry = plugins(group)[name]
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
    return f"{GROUPS[group]} '{name}' (entry point {entry.value} of {package})"


def origin(group: str, name: str) -> dict[str, str]:
    """Package, version and source hash of a plug-in: what its results depend on besides settings and data.

    Empty for a built-in module, which profcil's version stands for.
    """
    if group == "methods" and is_file_name(name):
        return {"package": "", "version": "", "source": digest_of([Path(name)])}
    if group == "methods" and name in GIVEN_METHODS:
        return {"package": "", "version": "", "source": class_digest(GIVEN_METHODS[name].METHOD)}
    return plugin_origin(group, name) if name in plugins(group) else {}


def class_digest(cls: type) -> str:
    """A hash of the source of a class; empty where Python does not have it, as in some shells."""
    import inspect

    try:
        return hashlib.blake2b(inspect.getsource(cls).encode(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return ""


def digest_of(paths: Iterable[Path]) -> str:
    source = hashlib.blake2b(digest_size=16)
    for path in paths:
        source.update(path.read_bytes())
    return source.hexdigest()


@cache
def plugin_origin(group: str, name: str) -> dict[str, str]:
    entry = plugins(group)[name]
    package = entry.dist.name if entry.dist else ""
    version = entry.dist.version if entry.dist else ""
    return {"package": package, "version": version, "source": digest_of(source_files(entry.module))}


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
    for attribute in ("modalities", "kinds", "exact_kinds"):
        if not is_set_of_texts(getattr(method, attribute)):
            return f"has a METHOD whose {attribute} is no set of texts; write it as frozenset({{...}})"
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


def is_set_of_texts(value: Any) -> bool:
    return isinstance(value, set | frozenset) and all(isinstance(one, str) for one in value)


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


def check_logger(name: str, module: Any) -> str:
    """Checks `LOGGER`: a class derived from Logger."""
    from profcil.loggers.base import Logger

    logger = module.LOGGER
    is_logger = isinstance(logger, type) and issubclass(logger, Logger)
    return "" if is_logger else "has a LOGGER that is not a logger class; derive it from profcil.extend.Logger"


CHECKS = {"methods": check_method, "data": check_dataset, "encoders": check_encoder, "loggers": check_logger}
