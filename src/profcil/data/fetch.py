"""Getting official files: downloads that resume, are checked before they count, and are unpacked where they are wanted.

A download grows in `<name>.part` and takes its real name only once its size and checksum are right, so a file that
is there is a whole file. Only the standard library is used.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from profcil.data import files
from profcil.data._unpack import CAP, unpack
from profcil.data.bundle import Facts, File
from profcil.errors import DataError, Failure, of_a_file

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all if known
CHUNK = 1 << 18
ATTEMPTS = 4
PAUSE = 1.0  # seconds, growing with each attempt
PATIENCE = 30.0  # seconds without a byte
BROKEN = (urllib.error.URLError, http.client.HTTPException, OSError)


def silent(name: str, done: int, total: int | None) -> None:
    """Progress for nobody."""


def fetch(facts: Facts, root: Path, progress: Progress = silent, force: bool = False) -> list[Path]:
    """Download (and unpack) what a dataset lacks into `root/name`; the files it now has."""
    home = root / facts.name
    wanted = [file for file in facts.files if file.url and file.layout == facts.files[0].layout]
    if not wanted:
        raise DataError(f"{facts.title} has no address to fetch from; get it with {facts.get}")
    have = files.inventory(facts, root)
    for file in wanted:
        needed = have if file.archive else {file: have.get(file)}
        whole = all(path and not files.fault(each, path, checksum=False) for each, path in needed.items())
        if force or not whole or (file.archive and (home / file.path).exists()):
            obtain(file, home / file.path, progress, force)
    return [path for path in files.inventory(facts, root).values() if path]


def obtain(file: File, target: Path, progress: Progress, force: bool) -> None:
    """One file at its place; an archive is unpacked and then removed, so one that lies there is unfinished work."""
    if force or not target.exists() or files.fault(file, target):
        download(file, target, progress)
    if file.archive:
        unpack(target, target.parent)
        target.unlink()


def download(file: File, target: Path, progress: Progress = silent) -> Path:
    """The whole, verified file at `target`; what an earlier attempt left is continued."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    complaint: object = "the connection closed early"
    for attempt in range(ATTEMPTS):
        time.sleep(attempt * PAUSE)
        try:
            if receive(file, part, progress):
                return accept(file, part, target)
        except urllib.error.HTTPError as error:
            raise Failure(f"{file.url} answered {error.code} {error.reason}; get the file by hand") from error
        except BROKEN as error:
            if isinstance(error, OSError) and of_a_file(error):
                raise
            complaint = error
    done = part.stat().st_size if part.exists() else 0
    raise Failure(
        f"the download of {file.url} stopped after {done} bytes ({complaint}); "
        "run the same command again to continue it"
    )


def receive(file: File, part: Path, progress: Progress) -> bool:
    """One request for the bytes still lacking; whether the file is now whole as far as the server says."""
    start = part.stat().st_size if part.exists() else 0
    if file.size is not None and start == file.size:
        return True
    request = urllib.request.Request(file.url or "", headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        part.unlink()  # the server has no such bytes: what we hold is not a beginning of its file
        return False
    with response:
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if response.status == 206 and not resumed:
            part.unlink()  # other bytes than asked for: begin anew
            return False
        start = start if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else file.size
        done = pour(response, part, start, lambda done: progress(Path(file.path).name, done, total))
    return total is None or done >= total


def pour(response: IO[bytes], part: Path, start: int, report: Callable[[int], None]) -> int:
    """Append what comes to the part file, or begin it anew; how long it is then."""
    done = start
    with part.open("ab" if start else "wb") as stream:
        while chunk := response.read(CHUNK):
            done += stream.write(chunk)
            report(done)
            if done > CAP:
                raise DataError(
                    f"{part} grew beyond {CAP} bytes, more than any official file; delete it and the source"
                )
    return done


def accept(file: File, part: Path, target: Path) -> Path:
    """Give a verified download its name; a wrong one is deleted, since continuing it could never make it right."""
    wrong = files.fault(file, part)
    if wrong:
        part.unlink()
        raise DataError(f"the file from {file.url} {wrong} and was deleted; fetch it again or get it by hand")
    os.replace(part, target)
    return target
