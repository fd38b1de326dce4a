"""The lines that a node prints on its own screen and into its log, in plain words."""

from __future__ import annotations

from collections.abc import Collection

from profcil.engine.channel import When

STAGES = {"warmup": "warm-up", "dictionary": "search for the dictionary"}


def say(line: str) -> None:
    """Prints a line at once: the process may be killed at any time."""
    print(f"profcil: {line}", flush=True)


def left_out(reason: str) -> None:
    say(f"LEFT OUT: {reason}")


def cannot_join(reason: str) -> None:
    """A fault in the node's configuration or in the site's folder."""
    left_out(f"{reason}; correct this, test it with `profcil deploy check SITE`, and start this node again")


def connected(client: int, site: str, enrolled: Collection[int] | None) -> None:
    """The answer to the server's hello."""
    who = f"site {site}" if site else f"client {client}"
    if enrolled is not None and client not in enrolled:
        say(f"connected as {who}; the run has begun without it, and it takes part from the next position on")
    else:
        say(f"connected as {who}; waiting")


def begins(action: str, when: When, positions: int) -> None:
    """The start of a turn or a survey."""
    what = "training" if action == "turn" else "computing statistics,"
    say(f"{what} {place(when, positions)}")


def ends(action: str, when: When, positions: int, seconds: float) -> None:
    """The end of a turn or a survey. The server may ask for statistics even after the last round."""
    is_last = not when.before_stream and when.final and when.position == positions - 1 and action == "turn"
    then = "this was the last round of training" if is_last else "waiting"
    say(f"done in {seconds:.1f} s; {then}")


def failed(reason: str) -> None:
    say(f"this turn could not be computed: {reason}")


def place(when: When, positions: int) -> str:
    """The place of a turn in the run, counted from 1."""
    number = f"round {when.round + 1} of {when.rounds}"
    if when.before_stream:
        return f"{number} ({STAGES[when.stage]})"
    return f"{number} (position {when.position + 1} of {positions})"
