"""Signal handling: SIGTERM and SIGHUP like Ctrl-C, and sections that must not be interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import current_thread, main_thread
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class SignalInterrupt(KeyboardInterrupt):
    """A signal other than Ctrl-C that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def raise_interrupt(number: int, _: object) -> None:
    raise SignalInterrupt(number)


def exit_status(error: BaseException | None) -> int | None:
    """What a shell reports for the interrupt behind an error, 128 and the signal's number; None if there is none."""
    is_interrupt = False
    while error is not None:
        if isinstance(error, SignalInterrupt):
            return 128 + error.number
        is_interrupt = is_interrupt or isinstance(error, KeyboardInterrupt)
        error = error.__context__  # an interrupt is raised again with a message
    return 128 + signal.SIGINT if is_interrupt else None


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


def stop_signals_as_interrupt() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    Batch systems send SIGTERM before they kill a job. SIGHUP comes when a terminal or a connection is closed; where it
    is ignored, as under `nohup`, it stays so.
    """
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return signal_handlers(dict.fromkeys(handled, raise_interrupt))


def ignore_interrupts() -> AbstractContextManager[None]:
    """Ctrl-C and the stop signals are ignored."""
    return signal_handlers(dict.fromkeys((signal.SIGINT, *STOP_SIGNALS), signal.SIG_IGN))
