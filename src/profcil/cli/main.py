"""The command line: finds the verb, runs it, and turns an error into one sentence and an exit status.

Nothing slow is imported here or while a parser is built, so that help and error messages appear at once.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from profcil import __version__
from profcil.cli.parser import Parser
from profcil.errors import ProfcilError, file_error, is_file_error, unknown
from profcil.io.interrupts import exit_status, stop_signals_as_interrupt
from profcil.plugin_errors import after_method_files, in_plugin, place_of, reason_of

VERBS = (
    "run",
    "resume",
    "rollback",
    "predict",
    "eval",
    "export",
    "plan",
    "list",
    "check",
    "data",
    "compare",
    "diagnose",
    "study",
    "table",
    "figure",
    "report",
    "serve",
    "results",
    "verify",
    "audit",
    "bench",
    "doctor",
    "deploy",
    "status",
)  # modules in this folder
DEBUG = "PROFCIL_DEBUG"
BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    allow_any_character()
    try:
        with stop_signals_as_interrupt():
            status = dispatch(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
            return status
    except SystemExit as done:  # from argparse after --help, or from a plug-in
        return fail_unexpectedly(done) if in_plugin(done) else int(done.code or 0)
    except ProfcilError as error:
        return fail(str(error), error.exit_status)
    except KeyboardInterrupt as stop:
        return fail(str(stop) or "interrupted; unfinished work was not saved", exit_status(stop) or 1)
    except BrokenPipeError:
        return close_output()
    except BaseException as error:  # a plug-in may raise what is no Exception
        if os.environ.get(DEBUG):
            raise
        if isinstance(error, RecursionError) and not in_plugin(error):
            return fail("a file or a value is nested too deeply to be read; give one with fewer brackets", 2)
        return fail_unexpectedly(error)


def fail_unexpectedly(error: BaseException) -> int:
    """Prints an error that no command expects, and returns the exit status."""
    if isinstance(error, OSError) and (stopped := exit_status(error)):
        return stopped  # the terminal is gone, and so is the progress on it
    if isinstance(error, OSError) and is_file_error(error) and not in_plugin(error):
        failure = file_error(error)
        return fail(str(failure), failure.exit_status)
    where = place_of(error) + ("" if in_plugin(error) else after_method_files())
    what = f"unexpected {type(error).__name__} ({reason_of(error)}){where}"
    return fail(f"{what}; run again with {DEBUG}=1 for the traceback", 1)


def dispatch(args: list[str]) -> int:
    """Runs a verb with the rest of the line. Only the module of that verb is imported."""
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0
    if args[0] == "--version":
        print(f"profcil {__version__}")
        return 0
    if args[0] not in VERBS:
        raise unknown("command", args[0], [*VERBS, "--help", "--version"])
    verb = importlib.import_module(f"profcil.cli.{args[0]}")
    parser = Parser(prog=f"profcil {args[0]}", description=verb.__doc__)
    verb.add(parser)
    return int(verb.run(parser.read(args[1:])) or 0)


def usage() -> str:
    """The overview of all commands, with the first line of each module's docstring."""
    docs = {verb: importlib.import_module(f"profcil.cli.{verb}").__doc__ or "" for verb in VERBS}
    lines = [f"  {verb:<9} {doc.strip().splitlines()[0]}" for verb, doc in docs.items()]
    head = ["usage: profcil COMMAND ...", "", "Heterogeneous federated class-incremental learning.", "", "commands:"]
    tail = ["", "`profcil COMMAND --help` shows a command's options; `profcil --version` the version.",
            "Start with `profcil run`: it learns the embedded digits and needs no download."]  # fmt: skip
    return "\n".join([*head, *lines, *tail])


def allow_any_character() -> None:
    """Prints a question mark, instead of failing, for a character that the terminal's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def fail(message: str, status: int) -> int:
    """Prints an error message and returns the exit status. A closed stderr, or a terminal that is gone, is ignored."""
    with suppress(OSError):
        print(f"profcil: {message}", file=sys.stderr)
    return status


def close_output() -> int:
    """Redirects stdout to nowhere after its reader has gone (`| head`), so that Python's last flush does not fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
