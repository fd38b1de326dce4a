"""Earlier states of a run, kept at the ends of positions, to which `profcil rollback` goes back.

A kept state is another name of the file that was written anyway: keeping it writes nothing, and takes the bytes of one
state on the disk. It has the end of ledger and events; of long ones, the rest is in their files, which only grow.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_facts, read_tensors, sync_folder

NAME = re.compile(r"position-(\d+)\.safetensors")


class KeptStates:
    """The folder `states` of a run folder."""

    def __init__(self, run: Path) -> None:
        self.run = Path(run)
        self.folder = self.run / "states"
        self.needed: dict[int, list[str]] = {}  # position → the files in clients/ that its state needs

    def positions(self) -> list[int]:
        """The numbers of scored positions in the kept states, ascending."""
        names = [NAME.fullmatch(path.name) for path in self.folder.glob("position-*.safetensors")]
        return sorted(int(name[1]) for name in names if name)

    def file(self, position: int) -> Path:
        return self.folder / f"position-{position}.safetensors"

    def keep(self, position: int, most: int, client_files: Iterable[str]) -> None:
        """Keeps the state that was just written, and removes the oldest beyond `most`."""
        self.folder.mkdir(exist_ok=True)
        link_or_copy(self.run / "state.safetensors", self.file(position))
        self.needed[position] = list(client_files)
        for old in self.positions()[:-most]:
            self.file(old).unlink(missing_ok=True)
        sync_folder(self.folder)

    def client_files(self) -> set[str]:
        """The files in clients/ that kept states need."""
        found: set[str] = set()
        for position in self.positions():
            if position not in self.needed:
                parked = (read_facts(self.file(position)) or {}).get("parked", [])
                self.needed[position] = [name for _, name in parked]
            found |= set(self.needed[position])
        return found

    def restore(self, position: int | None, current: tuple[int, int]) -> int:
        """Puts a kept state in place of the last one. By default the newest that is older than the current state,
        which is given as the number of scored positions and of rounds since. Removes the states after it."""
        kept = self.positions()
        earlier = [p for p in kept if (p, 0) < current]
        chosen = (earlier or [0])[-1] if position is None else position
        if chosen not in kept:
            have = ", ".join(map(str, kept)) or "none; run with --set keep_states=3 to keep some"
            wanted = "before the last state" if position is None else f"after position {position}"
            raise RunFolderError(f"{self.run} has no kept state {wanted}; there are states after positions: {have}")
        if read_tensors(self.file(chosen)) is None:
            raise RunFolderError(f"{self.file(chosen)} is damaged; choose another state with --to POSITION")
        link_or_copy(self.file(chosen), self.run / "state.safetensors")
        for later in kept:
            if later > chosen:
                self.file(later).unlink()
        sync_folder(self.run)
        return chosen


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, in place of what has that name. Copies it where there are no such names."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft)
    except OSError:
        shutil.copyfile(source, draft)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
    os.replace(draft, target)
