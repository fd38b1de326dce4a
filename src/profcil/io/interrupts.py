"""Signal handling: SIGTERM like Ctrl-C, and sections that must not be interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import current_thread, main_thread
from typing import Any


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def signal_handlers(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Installs signal handlers for a while. Does nothing outside the main thread, where Python does not allow it."""
    before = {}
    if current_thread() is main_thread():
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sigterm_as_interrupt() -> AbstractContextManager[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does. Batch systems send it before they kill a job."""
    return signal_handlers({signal.SIGTERM: raise_interrupt})


def ignore_interrupts() -> AbstractContextManager[None]:
    """SIGINT and SIGTERM are ignored."""
    return signal_handlers({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN})
