"""`profcil-supernode`: Flower's SuperNode, which runs only the apps on the site's own list.

It takes all options of `flower-supernode`, and --allow-apps FILE: one SHA-256 digest of an app a line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from profcil.deploy.client import screen
from profcil.deploy.client.allowed_apps import guard, read_allowed
from profcil.errors import ConfigError, Failure, ProfcilError, file_error

OPTION = "--allow-apps"


def main(argv: Sequence[str] | None = None) -> int:
    """Starts a SuperNode. It returns only if it cannot be started."""
    try:
        file, others = split_options(list(sys.argv[1:] if argv is None else argv))
        allowed = read_allowed(Path(file))
        install_guard(allowed)
    except (ProfcilError, OSError) as error:
        failure = file_error(error) if isinstance(error, OSError) else error
        print(f"profcil: {failure}", file=sys.stderr)
        return failure.exit_status
    screen.say(f"runs only the {len(allowed)} apps on the list {file}")
    from flwr.supernode.cli.flower_supernode import flower_supernode

    sys.argv = ["flower-supernode", *others]
    flower_supernode()
    return 0


def split_options(given: list[str]) -> tuple[str, list[str]]:
    """The file of --allow-apps, and the options for Flower."""
    for i, option in enumerate(given):
        name, has_value, value = option.partition("=")
        if name == OPTION and (has_value or i + 1 < len(given)):
            used = 1 if has_value else 2
            return value or given[i + 1], given[:i] + given[i + used :]
    raise ConfigError(f"profcil-supernode needs {OPTION} FILE, a file with one digest of an app a line")


def install_guard(allowed: frozenset[str]) -> None:
    """Puts the check in front of Flower's function that fetches apps. Fails if this Flower has no such function."""
    from flwr.supernode import start_client_internal as flower

    needed = {"receive", "get_run", "get_fab", "state", "object_store"}
    pull = getattr(flower, "_pull_and_store_message", None)
    if pull is None or not needed <= set(signature(pull).parameters):
        raise Failure("this version of Flower cannot be guarded; install the one that profcil[deploy] asks for")
    flower._pull_and_store_message = guard(pull, refuse, allowed)


def refuse(message: Any, reason: str, state: Any, store: Any) -> None:
    """Answers a message of a forbidden app with an error, as Flower does for an app without a valid signature."""
    from flwr.app import Error, Message
    from flwr.supernode.start_client_internal import FAB_VERIFICATION_ERROR, _insert_message

    screen.left_out(reason)
    _insert_message(Message(Error(FAB_VERIFICATION_ERROR.code, reason), reply_to=message), state, store)


if __name__ == "__main__":
    sys.exit(main())
