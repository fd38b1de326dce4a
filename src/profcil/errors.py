"""All errors of profcil. A message is one sentence: what was given, what is allowed, what to do next.

A mistake of the user is a `ProfcilError`; the command line ends with exit status 2. What fails during the work is a
`Failure`; the exit status is 1. Neither prints a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches


class ProfcilError(Exception):
    """A mistake of the user, explained in one sentence."""

    exit_status = 2


class ConfigError(ProfcilError):
    """A setting that is unknown, misspelt or out of range."""


class BrokenPlugin(ConfigError):
    """A plug-in that cannot be used."""


class DataError(ProfcilError):
    """A data file that is missing, damaged or not the official one."""


class RunFolderError(ProfcilError):
    """A run folder that cannot be used: locked by another process, read-only, incomplete, or on a full disk."""


class StoreError(ProfcilError):
    """A results store that cannot be used: damaged, edited, or in contradiction to a run."""


class NotApplicable(ProfcilError):
    """A method that cannot be used with this modality or model."""


class Failure(ProfcilError):
    """Something failed during the work: a client diverged, a download stopped."""

    exit_status = 1


class Diverged(Failure):
    """The loss or weights of a client are NaN, infinite or too large."""


class DataNote(UserWarning):
    """What was done with data that its owner may not expect, in one sentence."""


class CodeNote(UserWarning):
    """A model is used with other code than it was trained with, in one sentence."""


class ReuseNote(UserWarning):
    """A finished run was returned in place of a new one that would be the same."""


def count(number: int, what: str) -> str:
    """A number of things in a message, e.g. 1 run or 2 runs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def nearest(given: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the similar valid names, or all of them."""
    names = sorted(valid)
    close = get_close_matches(given, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "valid names: " + (", ".join(names) if names else "none")


def unknown(what: str, given: str, valid: Iterable[str]) -> ConfigError:
    """The error for an unknown name, with the nearest valid names."""
    advice = nearest(given, valid)
    return ConfigError(f"unknown {what} '{given}'; {advice}")


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
PATH_TAKEN = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)
ADVICE = {
    NO_SPACE: "free some space or choose another place",
    NO_PERMISSION: "check the permissions or choose another place",
    PATH_TAKEN: "move the existing file or folder, or choose another place",
    (errno.ENOENT,): "give a path that exists",
}


def is_file_error(error: OSError) -> bool:
    """Whether a file, a folder or the disk failed, and not the network."""
    of_the_disk = (*NO_SPACE, errno.EROFS, errno.EIO)
    return error.filename is not None or error.errno in of_the_disk


def file_error(error: OSError) -> ProfcilError:
    """The message about a file, a folder or a disk that failed, with advice."""
    advice = "check the disk"
    for numbers, text in ADVICE.items():
        if error.errno in numbers:
            advice = text
    where = "a file" if error.filename is None else error.filename
    return ProfcilError(f"{where} could not be read or written ({error.strerror}); {advice}")
