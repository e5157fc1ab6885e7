"""Signals that end a command: they interrupt the work, but not the report that it is complete."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sm_train.entrypoints.base.signals import record_interrupt, was_interrupted

_is_complete = False
_is_repeated = False
_main: FrameType | None = None


def handle_interrupts() -> None:
    """Handle Ctrl-C, SIGTERM and SIGHUP in the caller as below; handlers of the caller stay.

    So every command cleans up, and exits with a code, however it is ended.
    """
    global _main
    defaults = (signal.default_int_handler, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in defaults:
            _main = sys._getframe(1)
            signal.signal(number, _interrupt)
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
        _repeat_soon()
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import, once it has ended or at a second Ctrl-C.

    An exception in the import of a compiled module ends the process with a C++ error (PyTorch), or
    leaves the module half imported (pyarrow).
    """
    global _is_repeated
    may_wait = _is_repeated or not was_interrupted()
    _is_repeated = False
    if _is_complete:
        return
    record_interrupt(number)
    if may_wait and _is_importing(frame):
        _repeat_soon()
    else:
        raise KeyboardInterrupt


def _repeat_soon() -> None:
    main = threading.main_thread().ident or 0

    def repeat() -> None:
        global _is_repeated
        _is_repeated = True
        # A real signal: _thread.interrupt_main would not end a sleep of the main thread.
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(0.05, repeat)
    timer.daemon = True
    timer.start()


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether an import that the command began is not complete."""
    while frame is not None and frame is not _main:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
