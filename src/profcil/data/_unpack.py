"""Unpacking of untrusted archives: a member may only be a plain file or a folder inside the target folder."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from profcil.errors import DataError

MAX_BYTES = 8 << 30  # more than any official archive holds
MAX_MEMBERS = 1_000_000
MAX_HEADER = 1 << 20  # bytes of the extended header of a tar member, which holds names
# What reading a damaged archive raises. zipfile and tarfile let errors of parsing through.
FORMAT_ERRORS = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)
READ_ERRORS = (*FORMAT_ERRORS, RuntimeError, ValueError, LookupError, ArithmeticError, struct.error)
EXTENDED = (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
Archive = tarfile.TarFile | zipfile.ZipFile
Member = tarfile.TarInfo | zipfile.ZipInfo


def unpack(path: Path, folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack a tar or zip archive. All member names and sizes are checked before the first byte is written."""
    try:
        with open_archive(path) as archive:
            files = list(plain_files(archive, path))
            if sum(size for _, _, size in files) > max_bytes:
                raise DataError(f"{path} would unpack to more than {max_bytes} bytes; get the official archive")
            targets = [(target_path(path, folder, name), member) for name, member, _ in files]
            for target, member in targets:
                write_member(archive, member, target)
    except READ_ERRORS as error:
        raise damaged(path, error) from error
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # of the disk, not of the archive
            raise
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(f"{path} is damaged ({reason[:200]}); delete it and fetch it again")


class BoundedMember(tarfile.TarInfo):
    """A tar member whose extended header is not read if it is longer than any name."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type in EXTENDED and self.type != tarfile.GNUTYPE_SPARSE and self.size > MAX_HEADER:
            raise DataError(f"an archive has a header of {self.size} bytes and was refused; get the official archive")
        return super()._proc_member(archive)  # type: ignore[misc]


def open_archive(path: Path) -> Archive:
    """The archive, opened as a zip or a tar file."""
    if zipfile.is_zipfile(path):
        return zipfile.ZipFile(path)
    return tarfile.open(path, tarinfo=BoundedMember)


def plain_files(archive: Archive, path: Path) -> Iterator[tuple[str, Member, int]]:
    """Name, member and size of every plain file. Folders are skipped; links and devices are an error."""
    members: Iterable[Member] = archive.infolist() if isinstance(archive, zipfile.ZipFile) else archive
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise DataError(f"{path} has more than {MAX_MEMBERS} files and was refused; get the official archive")
        name, size, is_folder, is_file = describe(member)
        if is_folder:
            continue
        if not is_file:
            raise DataError(
                f"{path} contains {name}, which is a link or a device, and was refused; only files are unpacked"
            )
        yield name, member, size


def describe(member: Member) -> tuple[str, int, bool, bool]:
    """A member's name and size, whether it is a folder, and whether it is a plain file."""
    if isinstance(member, zipfile.ZipInfo):
        file_type = stat.S_IFMT(member.external_attr >> 16)
        return member.filename, member.file_size, member.is_dir(), file_type in (0, stat.S_IFREG)
    return member.name, member.size, member.isdir(), member.isreg()


def target_path(path: Path, folder: Path, name: str) -> Path:
    """The path of a member below the target folder; a name that leads outside is an error."""
    pure = PurePosixPath(name)
    target = folder / pure
    is_inside = target.resolve().is_relative_to(folder.resolve())
    is_windows_path = "\\" in name or ":" in name
    if pure.is_absolute() or ".." in pure.parts or is_windows_path or not is_inside:
        raise DataError(
            f"{path} contains {name}, which lies outside the target folder, and was refused; get the official archive"
        )
    return target


def write_member(archive: Archive, member: Member, target: Path) -> None:
    """Write one member atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    is_zip = isinstance(archive, zipfile.ZipFile)
    source: Any = archive.open(member) if is_zip else archive.extractfile(member)  # type: ignore
    with source as stream, partial.open("wb") as out:
        shutil.copyfileobj(stream, out)
    os.replace(partial, target)
