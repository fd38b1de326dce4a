"""The private tensors of clients between rounds: the most recently used in memory, the others in files.

At most `limit` bytes of these tensors are in memory and in a saved state, whatever the number of clients. The others
are in files of the run folder. A file is named after its content and never changed, so that an earlier state stays
valid. Files that no state needs any more are removed when the next state is saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from profcil.errors import RunFolderError
from profcil.io.atomic_files import digest, read_tensors, write_tensors

MEMORY_LIMIT = 4_000_000_000  # bytes
EACH = 1_000  # bytes that a tensor needs besides its numbers

Tensors = dict[str, Tensor]


class ClientStore(MutableMapping[int, Tensors]):
    """Private tensors by client. Tensors are never changed in place, so copies of the store share them."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        in_memory: Mapping[int, Tensors] | None = None,
        in_files: Mapping[int, str] | None = None,
        limit: int = MEMORY_LIMIT,
    ) -> None:
        self.folder = folder
        self.device = device
        self.limit = limit
        self.in_memory: OrderedDict[int, Tensors] = OrderedDict(in_memory or {})  # least recently used first
        self.in_files = dict(in_files or {})  # client → file name
        self.bytes = sum(map(size, self.in_memory.values()))

    def __getitem__(self, client: int) -> Tensors:
        if client in self.in_files:
            self[client] = self.read(self.in_files[client])
        self.in_memory.move_to_end(client)
        return self.in_memory[client]

    def __setitem__(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        self.in_files.pop(client, None)
        replaced = self.in_memory.pop(client, {})
        self.bytes += size(tensors) - size(replaced)
        self.in_memory[client] = dict(tensors)
        while self.bytes > self.limit and len(self.in_memory) > 1:
            oldest, its_tensors = self.in_memory.popitem(last=False)
            self.write_file(oldest, its_tensors)

    def __delitem__(self, client: int) -> None:
        if self.in_files.pop(client, None) is None:
            self.bytes -= size(self.in_memory.pop(client))

    def __iter__(self) -> Iterator[int]:
        return iter([*self.in_memory, *self.in_files])  # a copy, because reading a client may move others to files

    def __len__(self) -> int:
        return len(self.in_memory) + len(self.in_files)

    def __contains__(self, client: object) -> bool:
        return client in self.in_memory or client in self.in_files

    def copy(self) -> ClientStore:
        return ClientStore(self.folder, self.device, self.in_memory, self.in_files, self.limit)

    def write_file(self, client: int, tensors: Tensors) -> None:
        """Moves a client's tensors to a file."""
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        name = f"{client}-{digest(on_cpu, '')}.safetensors"
        try:
            write_tensors(self.folder / name, on_cpu, {})
        except OSError as error:
            raise RunFolderError(
                f"{self.folder} could not be written ({error.strerror}); the last saved state is complete: free space "
                f"and continue with `profcil resume {self.folder.parent}`"
            ) from None
        self.in_files[client] = name
        self.bytes -= size(tensors)

    def read(self, name: str) -> Tensors:
        """A client's tensors from a file, on the device."""
        path = self.folder / name
        stored = read_tensors(path)
        if stored is None:
            raise RunFolderError(f"{path} is missing or damaged; start the run again with another --out")
        tensors, _ = stored
        return {key: tensor.to(self.device) for key, tensor in tensors.items()}


def size(tensors: Mapping[str, Tensor]) -> int:
    """The bytes that these tensors need in memory."""
    return sum(t.numel() * t.element_size() + EACH for t in tensors.values())


def sweep(folder: Path, needed: Iterable[str]) -> None:
    """Removes the files of clients that are not in `needed`, and incomplete ones."""
    if not folder.is_dir():
        return
    complete = set(folder.glob("*-*.safetensors"))
    incomplete = set(folder.glob(".*-*.safetensors.*.part"))
    needed_files = {folder / name for name in needed}
    for path in (complete | incomplete) - needed_files:
        path.unlink(missing_ok=True)
