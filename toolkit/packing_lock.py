"""One pack at a time in a folder, and signals that end it in order."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from sm_train.entrypoints.pack_shard import WORK
from sm_train.entrypoints.storage import Folder, Place
from sm_train.toolkit.errors import UserError


@contextmanager
def locked(destination: Place) -> Iterator[None]:
    """Keep other packs out of a folder; what was made for it in vain goes again.

    Two packs of the same inputs into one S3 prefix write the same bytes, so nothing is locked
    there.
    """
    if not isinstance(destination, Folder):
        yield
        return
    folder = destination.path
    made = [one for one in (folder / WORK, folder, *folder.parents) if not one.exists()]
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    try:
        with (folder / WORK / "lock").open("w") as lock:
            try:
                # The kernel frees it however this process ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{folder}: another sm-train pack is writing to it") from None
            yield
            _clear(folder)
    except BaseException:
        if not any(one.name != "lock" for one in (folder / WORK).glob("*")):
            _clear(folder)
        for one in made:
            with suppress(OSError):  # not empty: what is finished stays
                one.rmdir()
        raise


def _clear(folder: Path) -> None:
    """Remove the folder of records, if nothing is left in it but the lock."""
    work = folder / WORK
    with suppress(OSError):
        (work / "lock").unlink()
        work.rmdir()


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
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
def signals_noted() -> Iterator[Callable[[], None]]:
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
