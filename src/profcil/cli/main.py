"""The command line: finds the verb, runs it, and turns whatever goes wrong into one sentence and an exit status.

Nothing heavy is imported here or while a parser is built, so help and mistakes answer at once.
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

VERBS = (
    "run",
    "resume",
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
    "bench",
    "doctor",
    "deploy",
    "status",
)  # modules of this folder
DEBUG = "PROFCIL_DEBUG"
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status."""
    spell_anyhow()
    try:
        status = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except SystemExit as done:  # argparse after --help
        return int(done.code or 0)
    except ProfcilError as error:
        return tell(str(error), error.exit_status)
    except KeyboardInterrupt as stop:
        return tell(str(stop) or "interrupted; what was not finished was not kept", INTERRUPTED)
    except BrokenPipeError:
        return hush()
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        if isinstance(error, OSError) and is_file_error(error):
            refusal = file_error(error)
            return tell(str(refusal), refusal.exit_status)
        reason = " ".join(str(error).split())
        return tell(f"unexpected {type(error).__name__} ({reason}); run again with {DEBUG}=1 for the traceback", 1)


def dispatch(args: list[str]) -> int:
    """Hands the rest of the line to a verb; only that verb's module is imported."""
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
    """The overview; a verb's own first line says what it does."""
    docs = {verb: importlib.import_module(f"profcil.cli.{verb}").__doc__ or "" for verb in VERBS}
    lines = [f"  {verb:<9} {doc.strip().splitlines()[0]}" for verb, doc in docs.items()]
    head = ["usage: profcil COMMAND ...", "", "Heterogeneous federated class-incremental learning.", "", "commands:"]
    tail = ["", "`profcil COMMAND --help` shows a command's options; `profcil --version` the version.",
            "Start with `profcil run`: it learns the embedded digits and needs no download."]  # fmt: skip
    return "\n".join([*head, *lines, *tail])


def spell_anyhow() -> None:
    """What the terminal's encoding has no letter for is a question mark, not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def tell(sentence: str, status: int) -> int:
    """One sentence for the user; a reader that has gone away is no reason for a second error."""
    with suppress(BrokenPipeError):
        print(f"profcil: {sentence}", file=sys.stderr)
    return status


def hush() -> int:
    """The reader of our output left (`| head`): nothing more is written, not even by the interpreter at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
