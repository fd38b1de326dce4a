"""Which Flower apps a site runs: only those whose digest is on the site's own list.

Flower sends an app's code from the server to the nodes. The list is checked in the site's SuperNode, before the app is
stored, unpacked or run. A check inside the app would be of no use: a changed app would leave it out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from profcil.errors import ConfigError

DIGEST = re.compile(r"[0-9a-f]{64}")


class ForbiddenApp(Exception):
    """An app that the site does not run, and why."""


def app_digest(folder: Path) -> str:
    """The SHA-256 of the bundle that `flwr run` makes from an app's folder."""
    from flwr.cli.build import build_fab_from_disk

    try:
        return hashlib.sha256(build_fab_from_disk(Path(folder))).hexdigest()
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is not a Flower app ({error}); write one with `profcil deploy app`") from None


def read_allowed(path: Path) -> frozenset[str]:
    """The digests in a file, one a line. Text after # is a comment."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file; write one digest a line") from None
    digests = [line for line in lines if line]
    for line in digests:
        if not DIGEST.fullmatch(line):
            raise ConfigError(f"{path} has the line '{line[:80]}', which is no digest of an app; write 64 hex digits")
    return frozenset(digests)


def check_run(run: Any, allowed: Collection[str]) -> None:
    """Refuses a run of another app, and a run that replaces settings of the app, which are part of its digest."""
    if run.fab_hash not in allowed:
        raise ForbiddenApp(f"the app {run.fab_hash} is not on this site's list of allowed apps")
    if run.override_config:
        names = ", ".join(sorted(run.override_config))
        raise ForbiddenApp(f"the run replaces settings of the allowed app ({names[:200]})")


def check_bundle(bundle: Any, digest: str) -> None:
    """Refuses an app whose bytes do not have the digest of its run."""
    if not digest == bundle.hash_str == hashlib.sha256(bundle.content).hexdigest():
        raise ForbiddenApp(f"the app that the server sent does not have the digest {digest}")


def guard(pull: Callable[..., Any], refuse: Callable[..., None], allowed: Collection[str]) -> Callable[..., Any]:
    """Flower's function that receives a message and the app that it is for, with the check of the app added.

    `refuse` answers a message with an error. Nothing of the app is kept.
    """

    def pull_if_allowed(*, receive: Any, get_run: Any, get_fab: Any, **others: Any) -> Any:
        received: list[Any] = []

        def receive_and_note() -> Any:
            found = receive()
            received[:] = [found[0]] if found else []
            return found

        def get_allowed_run(run_id: int) -> Any:
            run = get_run(run_id)
            check_run(run, allowed)
            return run

        def get_checked_fab(digest: str, run_id: int) -> Any:
            bundle = get_fab(digest, run_id)
            check_bundle(bundle, digest)
            return bundle

        try:
            return pull(receive=receive_and_note, get_run=get_allowed_run, get_fab=get_checked_fab, **others)
        except ForbiddenApp as reason:
            refuse(received[0], str(reason), others["state"], others["object_store"])
            return received[0].metadata.run_id

    return pull_if_allowed
