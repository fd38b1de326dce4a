"""The only registry: a name is a module in a folder, or an entry point of another package.

`find("methods", "promax")` imports `profcil.methods.promax`. A third-party package adds a room's occupant with an
entry point in the group `profcil.methods`, `profcil.data` or `profcil.encoders`; nothing is edited here.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from profcil.errors import unknown

ROOMS = {"methods": "method", "data": "dataset", "encoders": "encoder"}
# Files in those folders that are furniture, not occupants.
FURNITURE = {
    "methods": {"base"},
    "data": {"bundle", "files", "fetch", "unpickle", "shelf"},
    "encoders": {"model", "views", "norms", "fused", "byhand", "grouped", "many", "bags"},
}


def names(room: str) -> list[str]:
    """What can be named in a room, without importing any of it."""
    folder = Path(__file__).parent / room
    own = {f.stem for f in folder.glob("*.py") if not f.stem.startswith("_")} - FURNITURE[room]
    return sorted(own | guests(room).keys())


@cache
def guests(room: str) -> dict[str, EntryPoint]:
    """What other packages bring; looking through all installed packages takes long enough to do it once."""
    return {e.name: e for e in entry_points(group=f"profcil.{room}")}


def find(room: str, name: str) -> ModuleType:
    """The module behind a name; an unknown name is an error that lists the nearest ones."""
    if name in guests(room):
        return guests(room)[name].load()
    if name not in names(room):
        raise unknown(ROOMS[room], name, names(room))
    return importlib.import_module(f"profcil.{room}.{name}")
