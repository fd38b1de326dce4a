"""The private tensors of clients between rounds: the most recently used in memory, the others in files.

At most `room` bytes of these tensors are in memory and in a saved state, whatever the number of clients. The others are
in files of the run folder. A file is named after its content and never changed, so that an earlier state stays valid.
Files that no state needs any more are removed when the next state is saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from profcil.errors import RunFolderError
from profcil.io.atomic_files import digest, read_tensors, write_tensors

ROOM = 4_000_000_000  # bytes
EACH = 1_000  # bytes that a tensor needs besides its numbers

Tensors = dict[str, Tensor]


class ClientStore(MutableMapping[int, Tensors]):
    """Private tensors by client. Tensors are never changed in place, so copies of the store share them."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        near: Mapping[int, Tensors] | None = None,
        away: Mapping[int, str] | None = None,
        room: int = ROOM,
    ) -> None:
        self.folder = folder
        self.device = device
        self.room = room
        self.near: OrderedDict[int, Tensors] = OrderedDict(near or {})  # least recently used first
        self.away = dict(away or {})  # client → file name
        self.bytes = sum(map(size, self.near.values()))

    def __getitem__(self, client: int) -> Tensors:
        if client in self.away:
            self[client] = self.read(self.away[client])
        self.near.move_to_end(client)
        return self.near[client]

    def __setitem__(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        self.away.pop(client, None)
        self.bytes += size(tensors) - size(self.near.pop(client, {}))
        self.near[client] = dict(tensors)
        while self.bytes > self.room and len(self.near) > 1:
            self.write_file(*self.near.popitem(last=False))

    def __delitem__(self, client: int) -> None:
        if self.away.pop(client, None) is None:
            self.bytes -= size(self.near.pop(client))

    def __iter__(self) -> Iterator[int]:
        return iter([*self.near, *self.away])  # a copy, because reading a client may move others to files

    def __len__(self) -> int:
        return len(self.near) + len(self.away)

    def __contains__(self, client: object) -> bool:
        return client in self.near or client in self.away

    def copy(self) -> ClientStore:
        return ClientStore(self.folder, self.device, self.near, self.away, self.room)

    def write_file(self, client: int, tensors: Tensors) -> None:
        """Moves a client's tensors to a file."""
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        name = f"{client}-{digest(on_cpu, '')}.safetensors"
        try:
            write_tensors(self.folder / name, on_cpu, {})
        except OSError as error:
            raise RunFolderError(
                f"{self.folder} could not be written ({error.strerror}); the last saved state is complete: make room "
                f"and continue with `profcil resume {self.folder.parent}`"
            ) from None
        self.away[client] = name
        self.bytes -= size(tensors)

    def read(self, name: str) -> Tensors:
        """A client's tensors from a file, on the device."""
        found = read_tensors(self.folder / name)
        if found is None:
            raise RunFolderError(f"{self.folder / name} is missing or damaged; start the run again with another --out")
        return {k: t.to(self.device) for k, t in found[0].items()}


def size(tensors: Mapping[str, Tensor]) -> int:
    """The bytes that these tensors need in memory."""
    return sum(t.numel() * t.element_size() + EACH for t in tensors.values())


def sweep(folder: Path, needed: Iterable[str]) -> None:
    """Removes the files of clients that are not in `needed`, and incomplete ones."""
    if not folder.is_dir():
        return
    files = {*folder.glob("*-*.safetensors"), *folder.glob(".*-*.safetensors.*.part")}
    for path in files - {folder / name for name in needed}:
        path.unlink(missing_ok=True)
