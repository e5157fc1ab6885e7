"""Signals that end a program, heard when it can bear them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Turn the first signal that ends a program into KeyboardInterrupt, and ignore the rest.

    A second one would break off the cleaning up. Signals that are ignored already (``nohup``)
    stay so. Only the main thread may set handlers, so only it may pack.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _heard():
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def record_signals() -> Iterator[Callable[[], None]]:
    """Let signals wait for the call of a function, which raises KeyboardInterrupt if one came.

    An exception out of nowhere may leave the locks of a pool of processes taken for ever.
    """
    noted: list[int] = []

    def raise_noted() -> None:
        if noted:
            raise KeyboardInterrupt

    with _handled(lambda number, _: noted.append(number)):
        yield raise_noted
        raise_noted()


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _heard() -> list[signal.Signals]:
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _heard()}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
