"""The only registry: a name is a module in a folder, or an entry point of another package.

`find("methods", "promax")` imports `profcil.methods.promax`. A third-party package adds a room's occupant with an
entry point in the group `profcil.methods`, `profcil.data` or `profcil.encoders`; nothing is edited here.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from profcil.errors import unknown

ROOMS = {"methods": "method", "data": "dataset", "encoders": "encoder"}
# Files in those folders that are furniture, not occupants.
FURNITURE = {
    "methods": {"base"},
    "data": {"bundle", "files", "fetch", "unpickle", "shelf"},
    "encoders": {"model", "views", "norms", "fused"},
}


def names(room: str) -> list[str]:
    """What can be named in a room, without importing any of it."""
    folder = Path(__file__).parent / room
    own = {f.stem for f in folder.glob("*.py") if not f.stem.startswith("_")} - FURNITURE[room]
    return sorted(own | {e.name for e in entry_points(group=f"profcil.{room}")})


def find(room: str, name: str) -> ModuleType:
    """The module behind a name; an unknown name is an error that lists the nearest ones."""
    for entry in entry_points(group=f"profcil.{room}", name=name):
        return entry.load()
    if name not in names(room):
        raise unknown(ROOMS[room], name, names(room))
    return importlib.import_module(f"profcil.{room}.{name}")
