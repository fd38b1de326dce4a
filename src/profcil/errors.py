"""One family of errors, one wording: what was given, what is allowed, what to do next.

Everything a user can cause is a `ProfcilError` and ends the command line with exit status 2; everything that
goes wrong while working is a `Failure` and ends it with 1. Neither shows a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ProfcilError(Exception):
    """A user's mistake, told in one sentence."""

    exit_status = 2


class ConfigError(ProfcilError):
    """A setting that is unknown, misspelt or out of range."""


class Broken(ConfigError):
    """Something of another package that cannot be used."""


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
