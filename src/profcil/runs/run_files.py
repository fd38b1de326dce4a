"""Reads single files of a run folder. An error of reading says in one sentence which file it is and what to do."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from profcil.errors import RunFolderError

Parsed = TypeVar("Parsed")
# What reading a missing or damaged file raises. Errors of TOML, JSON and UTF-8 are ValueErrors.
READ_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def is_locked(lock: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def check_folder(path: Path) -> None:
    """Refuses a path that is not a run folder, which has a config.toml."""
    with explain_read_errors(path):
        if (path / "config.toml").is_file():
            return
        if path.is_dir():
            problem = "is not a run folder (it has no config.toml)"
        elif path.is_file():
            problem = "is a file, not a run folder"
        else:
            problem = "does not exist"
        raise RunFolderError(f"{path} {problem}; give a folder that `profcil run` wrote")


def parse_file(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    """Reads a text file and parses it; any failure is a RunFolderError that names the file."""
    with explain_read_errors(path):
        try:
            return parse(path.read_text(encoding="utf-8"))
        except RunFolderError as error:  # about the content; the file name is added outside
            raise ValueError(str(error)) from None


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turns an error of reading a file or folder into one sentence that says what to do."""
    try:
        yield
    except READ_ERRORS as error:
        if isinstance(error, KeyError):
            reason: Any = f"no {error}"
        else:
            reason = getattr(error, "strerror", None) or error
        raise RunFolderError(f"{path} cannot be read ({reason}); {advise(path, error)}") from None


def advise(path: Path, error: BaseException) -> str:
    """What to do about a file that cannot be read."""
    if isinstance(error, PermissionError):
        return "check its permissions, or leave this run out"
    if path.name == "config.toml":
        return "restore the file, or leave this run out"
    return advise_resume(path.parent)


def advise_resume(path: Path) -> str:
    return (
        f"`profcil resume {path}` rewrites the readable files if the saved state is complete, else leave this run out"
    )


def parse_json_table(text: str) -> dict[str, Any]:
    """Parses a JSON object."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a table of names and values")
    return values


def changed_message(path: Path, name: str) -> str:
    return f"{path / name} is not what the run wrote (its digest differs); {advise_resume(path)}"


def read_alignments(path: Path) -> list[dict[str, Any]]:
    """The alignment values that the run logged after every position."""
    return parse_file(path / "events.jsonl", parse_alignments)


def parse_alignments(text: str) -> list[dict[str, Any]]:
    events = [parse_event(line) for line in text.splitlines()]
    return [dict(event.get("alignment", {})) for event in events if event["event"] == "position"]


def parse_event(line: str) -> dict[str, Any]:
    """Parses one line of events.jsonl."""
    event = parse_json_table(line)
    if "event" not in event:
        raise ValueError("a line of it names no event")
    return event
