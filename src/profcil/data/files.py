"""Where official files lie, whether they are the official ones, and how arrays decoded from them are kept.

A dataset `name` is looked for in `root/name`, with and without the folder its official archive unpacks to, and in
that folder directly under `root`: whatever a user gets by unpacking the archive in a natural place is found.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import numpy as np

from profcil.data.bundle import Facts, File
from profcil.errors import DataError, of_a_file

Arrays = dict[str, np.ndarray]
CHECKSUMS = ("sha256", "sha1", "md5")


def places(facts: Facts, root: Path, path: str) -> list[Path]:
    """Everywhere an official file may lie, the most official place first."""
    parts = PurePosixPath(path).parts
    home = root / facts.name
    if len(parts) == 1:
        return [home / path]
    return [home / path, home.joinpath(*parts[1:]), root / path]


def seek(facts: Facts, root: Path, path: str) -> Path | None:
    """The first place that holds the file or folder, or None."""
    return next((place for place in places(facts, root, path) if place.exists()), None)


def locate(facts: Facts, root: Path, path: str) -> Path:
    """The place that holds the file or folder; nowhere is an error that says where it was looked for."""
    found = seek(facts, root, path)
    if found is None:
        raise missing(facts, root, path)
    return found


def missing(facts: Facts, root: Path, path: str) -> DataError:
    """The sentence about a file that is in none of its places."""
    looked = " and ".join(str(place.parent) for place in places(facts, root, path))
    name = PurePosixPath(path).name
    get = f"get it with {how(facts)}" if how(facts) else "put it there"
    return DataError(f"{facts.title}'s {name} was not found; looked in {looked}; {get}")


def how(facts: Facts) -> str:
    """How to get a dataset, as the end of a sentence."""
    ways = [f"`profcil data fetch {facts.name}`"] if any(file.url for file in facts.files) else []
    return " or ".join([*ways, *([facts.get] if facts.get else [])])


def again(facts: Facts) -> str:
    """What to do about a dataset that is not whole, as the end of a sentence."""
    return f"get it again with {how(facts)}" if how(facts) else "put its files where its loader looks for them"


def damaged(facts: Facts, path: Path, why: str) -> DataError:
    """The sentence about a file that is there and is not what its name says."""
    return DataError(f"{facts.title}'s {path} {why}; replace it with the official file ({facts.homepage})")


@contextmanager
def readable(root: Path) -> Iterator[None]:
    """A folder or file of the data that may not be read is one sentence."""
    try:
        yield
    except OSError as error:
        if not of_a_file(error):
            raise
        where = error.filename or root
        raise DataError(
            f"{where} cannot be read ({error.strerror}); let yourself read it, or give another --data-dir"
        ) from None


def layouts(facts: Facts) -> dict[str, list[File]]:
    """The files a loader reads, by official layout; archives are only the way to get them."""
    groups: dict[str, list[File]] = {}
    for file in facts.files:
        if not file.archive:
            groups.setdefault(file.layout, []).append(file)
    return groups


def inventory(facts: Facts, root: Path) -> dict[File, Path | None]:
    """Where each needed file is, for the first layout that is all there, else for the one that has most."""
    found = [{file: seek(facts, root, file.path) for file in group} for group in layouts(facts).values()]
    return max(found, key=lambda group: sum(map(bool, group.values())) / len(group), default={})


def digest(path: Path, algorithm: str) -> str:
    """A file's checksum, without reading it whole."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def fault(file: File, path: Path, checksum: bool = True) -> str | None:
    """What is wrong with a file next to its facts, as the end of a sentence, or None."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"has {size} bytes where the official file has {file.size}"
    for algorithm in CHECKSUMS if checksum else ():
        official = getattr(file, algorithm)
        if official and (got := digest(path, algorithm)) != official:
            return f"has {algorithm} {got} where the official file has {official}"
    return None


def stamp(lines: Iterable[object]) -> str:
    """A short name for what an array was decoded from."""
    return hashlib.blake2b("\n".join(map(str, lines)).encode(), digest_size=8).hexdigest()


def stat_stamp(paths: Iterable[Path]) -> str:
    """A short name for the present state of these files."""
    return stamp((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


def cached(beside: Path, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays that are slow to decode: made once, kept beside the data, or in the user's cache if that is read-only."""
    homes = [beside / ".profcil", user_cache()]
    for home in homes:
        with suppress(OSError):
            return read_arrays(home / key)
    arrays = make()
    for home in homes:
        with suppress(OSError):
            write_arrays(home / key, arrays)
            break
    return arrays  # nowhere to keep them is slow, not wrong


def user_cache() -> Path:
    """The folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "profcil" / "data"


def read_arrays(folder: Path) -> Arrays:
    """The arrays of a cache folder."""
    try:
        return {path.stem: np.load(path, allow_pickle=False) for path in sorted(folder.iterdir())}
    except (ValueError, EOFError) as error:
        shutil.rmtree(folder, ignore_errors=True)  # damaged, so it is made again
        raise FileNotFoundError(folder) from error


def write_arrays(folder: Path, arrays: Arrays) -> None:
    """All arrays or none: they are written apart and the folder is renamed into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(draft / f"{name}.npy", array, allow_pickle=False)
        draft.chmod(0o755)  # a shared data folder has other readers
        if not folder.exists():  # another process may have been first
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
