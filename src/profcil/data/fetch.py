"""Download of official files: resumable, verified before use, and unpacked into the dataset's folder.

A download is written to `<name>.part` and renamed only after its size and checksum were verified. A file with its
final name is therefore complete. Only the standard library is used.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from profcil.data import files
from profcil.data._unpack import unpack
from profcil.data.bundle import Facts, File
from profcil.errors import DataError, Failure, is_file_error

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, total bytes if known
CHUNK = 1 << 18  # bytes per read
ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt; grows with each attempt
TIMEOUT = 30.0  # seconds without a byte
MAX_UNKNOWN = 1 << 30  # bytes of a file whose official size is not known; the largest such file has 170 million
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, OSError)


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from an encrypted address to one that is not."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        if req.type == "https" and not newurl.startswith("https://"):
            raise urllib.error.URLError(f"it redirects to {newurl[:100]}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def no_progress(name: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""


def fetch(facts: Facts, root: Path, progress: Progress = no_progress, force: bool = False) -> list[Path]:
    """Download and unpack the missing files of a dataset into `root/name`. Returns all files it now has."""
    folder = root / facts.name
    wanted = []
    for file in facts.files:
        if file.url and file.layout == facts.files[0].layout:
            wanted.append(file)
    if not wanted:
        raise DataError(f"{facts.title} has no download address; get it with {facts.get}")
    present = files.inventory(facts, root)
    for file in wanted:
        target = folder / file.path
        needed = present if file.archive else {file: present.get(file)}
        is_leftover = file.archive and target.exists()
        if force or is_leftover or not is_complete(needed):
            fetch_file(file, target, progress, force)
    return [path for path in files.inventory(facts, root).values() if path]


def is_complete(needed: dict[File, Path | None]) -> bool:
    """Whether all files are present with the official sizes."""
    if None in needed.values():
        return False
    return not any(files.fault(file, path, checksum=False) for file, path in needed.items() if path)


def fetch_file(file: File, target: Path, progress: Progress, force: bool) -> None:
    """Download one file. An archive is unpacked and then deleted, so an archive on disk was not unpacked completely."""
    if force or not target.exists() or files.fault(file, target):
        download(file, target, progress)
    if file.archive:
        unpack(target, target.parent)
        target.unlink()


def download(file: File, target: Path, progress: Progress = no_progress) -> Path:
    """Download a file to `target` and verify it. A partial download of an earlier call is continued."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    reason: object = "the connection closed early"
    for attempt in range(ATTEMPTS):
        time.sleep(attempt * PAUSE)
        try:
            if request_rest(file, part, progress):
                return accept(file, part, target)
        except urllib.error.HTTPError as error:
            raise Failure(f"{file.url} answered {error.code} {error.reason}; get the file by hand") from error
        except NETWORK_ERRORS as error:
            if isinstance(error, OSError) and is_file_error(error):
                raise
            reason = error
        except ValueError as error:  # headers or an address that cannot be parsed
            raise Failure(f"{file.url} gave an answer that cannot be read ({error}); get the file by hand") from error
    raise Failure(
        f"the download of {file.url} stopped after {size_of(part)} bytes ({reason}); "
        "run the same command again to continue it"
    )


def size_of(part: Path) -> int:
    """The size of a file in bytes; 0 if it does not exist."""
    return part.stat().st_size if part.exists() else 0


def request_rest(file: File, part: Path, progress: Progress) -> bool:
    """Request the missing bytes once. Returns whether the file is now complete, as far as the server says."""
    start = size_of(part)
    if file.size is not None and start == file.size:
        return True
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(file.url or "", headers=headers)
    try:
        response = urllib.request.build_opener(SafeRedirects()).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        part.unlink()  # range not satisfiable: the partial file is not the beginning of the server's file
        return False
    with response:
        is_partial = response.status == 206
        if is_partial and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink()  # the server sent another range: start again
            return False
        start = start if is_partial else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else file.size
        check_size(file, part, total or 0)

        def report(done: int) -> None:
            progress(Path(file.path).name, done, total)
            check_size(file, part, done)

        done = save_response(response, part, start, report)
    return total is None or done >= total


def check_size(file: File, part: Path, size: int) -> None:
    """Refuse more bytes than the official file has. What was downloaded is deleted: continuing it cannot help."""
    limit = MAX_UNKNOWN if file.size is None else file.size
    if size > limit:
        part.unlink(missing_ok=True)
        raise DataError(f"{file.url} sends more than the {limit} bytes that are expected; get the file by hand")


def save_response(response: IO[bytes], part: Path, start: int, report: Callable[[int], None]) -> int:
    """Append a response to the partial file, or start the file again if `start` is 0. Returns the file's new size."""
    done = start
    with part.open("ab" if start else "wb") as stream:
        while chunk := response.read(CHUNK):
            done += stream.write(chunk)
            report(done)
    return done


def accept(file: File, part: Path, target: Path) -> Path:
    """Verify a complete download and give it its final name. A wrong one is deleted: continuing it cannot help."""
    fault = files.fault(file, part)
    if fault:
        part.unlink()
        raise DataError(f"the file from {file.url} {fault} and was deleted; fetch it again or get it by hand")
    os.replace(part, target)
    return target
