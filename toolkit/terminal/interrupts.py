"""Ctrl-C in a command: it interrupts the work, but not what only reports the work as complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_received: list[int] = []
_is_complete = False


def handle_interrupts() -> None:
    """Handle Ctrl-C in this process as below; a handler of the caller's own stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Return whether Ctrl-C interrupted the command."""
    return bool(_received)


def set_complete(is_complete: bool) -> None:
    """Ignore Ctrl-C from now on, or no longer.

    Call it before an output gets its final name. If the command then ended as interrupted, the same
    command would refuse to replace the output.
    """
    global _is_complete
    _is_complete = is_complete


@contextmanager
def delayed_interrupts(*numbers: signal.Signals) -> Iterator[None]:
    """Raise KeyboardInterrupt for these signals at the end of the context only.

    Child processes of the context get the signals as usual. Only the main thread handles signals:
    in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    earlier = [
        (number, signal.signal(number, lambda received_number, _: received.append(received_number)))
        for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in earlier:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        _received.extend(received)
        raise KeyboardInterrupt


def _interrupt(number: int, frame: object) -> None:
    if not _is_complete:
        _received.append(number)
        raise KeyboardInterrupt
