"""Ctrl-C in a command: it interrupts the work, but not what only reports the work as complete."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sm_train.entrypoints.common.signals import record_interrupt

_is_complete = False


def handle_interrupts() -> None:
    """Handle Ctrl-C in this process as below; a handler of the caller's own stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _repeat_dropped_interrupt


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
        record_interrupt(received[0])
        raise KeyboardInterrupt


def _repeat_dropped_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt again after Python has dropped a KeyboardInterrupt.

    It drops every exception of a finalizer or a callback of a weak reference, such as those of
    imports, and a command that waits would then wait for ever.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        # Now, it would be raised in this function and dropped again.
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt(number: int, frame: object) -> None:
    if not _is_complete:
        record_interrupt(number)
        raise KeyboardInterrupt
