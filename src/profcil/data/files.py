"""Official files: where they are, whether they are the official ones, and a cache for arrays decoded from them.

A dataset `name` is searched in `root/name`, with and without the folder its official archive unpacks to, and in
that folder directly under `root`. So the files are found wherever a user is likely to unpack the archive.
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
from profcil.errors import DataError, is_file_error

Arrays = dict[str, np.ndarray]
CHECKSUMS = ("sha256", "sha1", "md5")


def candidates(facts: Facts, root: Path, path: str) -> list[Path]:
    """All paths where an official file may be, the preferred one first."""
    parts = PurePosixPath(path).parts
    folder = root / facts.name
    if len(parts) == 1:
        return [folder / path]
    return [folder / path, folder.joinpath(*parts[1:]), root / path]


def find(facts: Facts, root: Path, path: str) -> Path | None:
    """The first candidate path that exists, or None."""
    return next((candidate for candidate in candidates(facts, root, path) if candidate.exists()), None)


def locate(facts: Facts, root: Path, path: str) -> Path:
    """The path of an official file or folder. If there is none, the error says where it was searched."""
    found = find(facts, root, path)
    if found is None:
        raise missing(facts, root, path)
    return found


def missing(facts: Facts, root: Path, path: str) -> DataError:
    """The error for a file that is at none of its candidate paths."""
    searched = " and ".join(str(candidate.parent) for candidate in candidates(facts, root, path))
    name = PurePosixPath(path).name
    ways = how_to_get(facts)
    advice = f"get it with {ways}" if ways else "put it there"
    return DataError(f"{facts.title}'s {name} was not found; looked in {searched}; {advice}")


def how_to_get(facts: Facts) -> str:
    """How to get a dataset, as the end of a sentence; empty if its facts do not say."""
    ways = []
    if any(file.url for file in facts.files):
        ways.append(f"`profcil data fetch {facts.name}`")
    if facts.get:
        ways.append(facts.get)
    return " or ".join(ways)


def how_to_repair(facts: Facts) -> str:
    """What to do about an incomplete dataset, as the end of a sentence."""
    ways = how_to_get(facts)
    return f"get it again with {ways}" if ways else "put its files where its loader looks for them"


def damaged(facts: Facts, path: Path, why: str) -> DataError:
    """The error for a file that exists but has the wrong content."""
    return DataError(f"{facts.title}'s {path} {why}; replace it with the official file ({facts.homepage})")


@contextmanager
def read_errors(root: Path) -> Iterator[None]:
    """Turn an OSError about a data file or folder into a DataError."""
    try:
        yield
    except OSError as error:
        if not is_file_error(error):
            raise
        where = error.filename or root
        raise DataError(
            f"{where} cannot be read ({error.strerror}); check its permissions, or give another --data-dir"
        ) from None


def files_by_layout(facts: Facts) -> dict[str, list[File]]:
    """The files that a loader reads, by official layout. Archives are left out: only their content is read."""
    groups: dict[str, list[File]] = {}
    for file in facts.files:
        if not file.archive:
            groups.setdefault(file.layout, []).append(file)
    return groups


def inventory(facts: Facts, root: Path) -> dict[File, Path | None]:
    """The path of each needed file (None if missing), for the first complete layout, else for the most complete."""
    groups = files_by_layout(facts).values()
    found = [{file: find(facts, root, file.path) for file in group} for group in groups]
    return max(found, key=share_present, default={})


def share_present(paths: dict[File, Path | None]) -> float:
    """Which fraction of the files exists."""
    return sum(map(bool, paths.values())) / len(paths)


def checksum_of(path: Path, algorithm: str) -> str:
    """A file's checksum, computed without loading the whole file into memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def fault(file: File, path: Path, checksum: bool = True) -> str | None:
    """How a file differs from its official size or checksum, as the end of a sentence, or None."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"has {size} bytes where the official file has {file.size}"
    if not checksum:
        return None
    for algorithm in CHECKSUMS:
        official = getattr(file, algorithm)
        if official and (actual := checksum_of(path, algorithm)) != official:
            return f"has {algorithm} {actual} where the official file has {official}"
    return None


def short_hash(lines: Iterable[object]) -> str:
    """A short hash of some values, as part of a cache key."""
    return hashlib.blake2b("\n".join(map(str, lines)).encode(), digest_size=8).hexdigest()


def stat_hash(paths: Iterable[Path]) -> str:
    """A short hash of the names, sizes and modification times of some files."""
    return short_hash((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


def cached(data_folder: Path, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays that are slow to decode, read from the cache or made and stored there.

    The cache is in the data folder, or in the user's cache folder if the data folder is read-only.
    """
    folders = [data_folder / ".profcil", user_cache()]
    for folder in folders:
        with suppress(OSError):
            return read_arrays(folder / key)
    arrays = make()
    for folder in folders:
        with suppress(OSError):
            write_arrays(folder / key, arrays)
            break
    return arrays  # if no cache folder is writable, they are decoded again next time


def user_cache() -> Path:
    """The folder for files that can be computed again."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "profcil" / "data"


def read_arrays(folder: Path) -> Arrays:
    """The arrays of a cache folder. A damaged folder is deleted and reported as not found."""
    try:
        return {path.stem: np.load(path, allow_pickle=False) for path in sorted(folder.iterdir())}
    except (ValueError, EOFError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise FileNotFoundError(folder) from error


def write_arrays(folder: Path, arrays: Arrays) -> None:
    """Write a cache folder atomically: the arrays go to a temporary folder, which is then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(draft / f"{name}.npy", array, allow_pickle=False)
        draft.chmod(0o755)  # other users of a shared data folder must be able to read it
        if not folder.exists():  # another process may have written it already
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
