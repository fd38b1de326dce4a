"""Unpacking with distrust: a member may be a plain file or a folder inside the target, and nothing else."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from profcil.errors import DataError

CAP = 8 << 30  # bytes; more than any official archive holds
BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError)
Box = tarfile.TarFile | zipfile.ZipFile


def unpack(archive: Path, into: Path, cap: int = CAP) -> None:
    """Unpack a tar or zip archive; all member names are judged before the first byte is written."""
    try:
        with opened(archive) as box:
            plan = list(members(box, archive))
            if sum(size for _, _, size in plan) > cap:
                raise DataError(f"{archive} would unpack to more than {cap} bytes; get the official archive")
            targets = [(inside(archive, into, name), member) for name, member, _ in plan]
            for target, member in targets:
                write(box, member, target)
    except BROKEN as error:
        raise DataError(f"{archive} is damaged ({error}); delete it and fetch it again") from error


def opened(archive: Path) -> Box:
    if zipfile.is_zipfile(archive):
        return zipfile.ZipFile(archive)
    return tarfile.open(archive)


def members(box: Box, archive: Path) -> Iterator[tuple[str, object, int]]:
    """Name, handle and size of every plain file; folders are made as needed, links and devices are refused."""
    listing = box.infolist() if isinstance(box, zipfile.ZipFile) else box.getmembers()
    for member in listing:
        if isinstance(member, zipfile.ZipInfo):
            name, size, folder = member.filename, member.file_size, member.is_dir()
            plain = stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG)
        else:
            name, size, folder, plain = member.name, member.size, member.isdir(), member.isreg()
        if not (folder or plain):
            raise DataError(
                f"{archive} holds {name}, which is a link or a device, and was refused; only files are unpacked"
            )
        if not folder:
            yield name, member, size


def inside(archive: Path, into: Path, name: str) -> Path:
    """The member's place below the target folder, or an error if it tries to leave it."""
    pure = PurePosixPath(name)
    target = into / pure
    stays = target.resolve().is_relative_to(into.resolve())
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or not stays:
        raise DataError(
            f"{archive} holds {name}, which lies outside the target folder, and was refused; get the official one"
        )
    return target


def write(box: Box, member: object, target: Path) -> None:
    """One member, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + ".part")
    source = box.open(member) if isinstance(box, zipfile.ZipFile) else box.extractfile(member)  # type: ignore[arg-type]
    with source as read, draft.open("wb") as out:  # type: ignore[union-attr]
        shutil.copyfileobj(read, out)
    os.replace(draft, target)
