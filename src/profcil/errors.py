"""One family of errors, one wording: what was given, what is allowed, what to do next.

Everything a user can cause is a `ProfcilError` and ends the command line with exit status 2; everything that
goes wrong while working is a `Failure` and ends it with 1. Neither shows a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches


class ProfcilError(Exception):
    """A user's mistake, told in one sentence."""

    exit_status = 2


class ConfigError(ProfcilError):
    """A setting that is unknown, misspelt or out of range."""


class BrokenPlugin(ConfigError):
    """A plug-in that cannot be used."""


class DataError(ProfcilError):
    """A data file that is missing, damaged or not what its name says."""


class RunFolderError(ProfcilError):
    """A run folder that cannot be used: in use, read-only, incomplete, full disk."""


class NotApplicable(ProfcilError):
    """A method that has no meaning for this modality or model."""


class Failure(ProfcilError):
    """Something broke while working: a diverging client, a download that stopped."""

    exit_status = 1


class Diverged(Failure):
    """A client's loss or weights are no longer usable numbers."""


def nearest(given: str, valid: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the near misses, or everything there is."""
    names = sorted(valid)
    close = get_close_matches(given, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "valid names: " + (", ".join(names) if names else "none")


def unknown(what: str, given: str, valid: Iterable[str]) -> ConfigError:
    """An unknown name of some kind, with the nearest valid ones."""
    return ConfigError(f"unknown {what} '{given}'; {nearest(given, valid)}")


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)


def of_a_file(error: OSError) -> bool:
    """Whether it is a file, a folder or the disk that refused, and not a network."""
    return error.filename is not None or error.errno in (*FULL, errno.EROFS, errno.EIO)


def refused_by_disk(error: OSError) -> ProfcilError:
    """What a file, a folder or the disk refused, and what to do."""
    ways = {
        FULL: "make room there, or choose another place",
        FORBIDDEN: "let yourself read and write there, or choose another place",
        IN_THE_WAY: "move what is in the way, or choose another place",
        (errno.ENOENT,): "give one that is there",
    }
    advice = next((way for numbers, way in ways.items() if error.errno in numbers), "see whether the disk is well")
    where = "a file" if error.filename is None else error.filename
    return ProfcilError(f"{where} could not be read or written ({error.strerror}); {advice}")
