"""Ctrl-C in a command: it interrupts the work, but not what only reports the work as complete."""

from __future__ import annotations

import signal

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


def _interrupt(number: int, frame: object) -> None:
    if not _is_complete:
        _received.append(number)
        raise KeyboardInterrupt
