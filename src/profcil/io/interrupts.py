"""Being told to stop: what counts as Ctrl-C, and what must not be broken off."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import current_thread, main_thread
from typing import Any


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def handled(how: dict[signal.Signals, Any]) -> Iterator[None]:
    """Within: these signals mean this. Only the main thread may say so; in any other nothing changes."""
    before = {number: signal.signal(number, way) for number, way in how.items()} if on_main() else {}
    try:
        yield
    finally:
        for number, way in before.items():
            signal.signal(number, way)


def ended_by_a_scheduler() -> AbstractContextManager[None]:
    """Within: SIGTERM, which batch systems send before they kill, ends things as Ctrl-C does."""
    return handled({signal.SIGTERM: stop})


def undisturbed() -> AbstractContextManager[None]:
    """Within: who asks once more to stop has to wait."""
    return handled({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN})


def on_main() -> bool:
    return current_thread() is main_thread()
