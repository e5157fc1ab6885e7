"""Nothing half-written: a private folder in the destination, and signals that clean up."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from sm_train.entrypoints.shard_index import INDEX_NAME, SHARDS_FOLDER
from sm_train.toolkit.errors import UserError

STAGING_NAME = ".packing"
"""Holds everything unfinished. A run that is killed outright leaves it for the next to clear."""


@contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """A private folder in ``destination``; gone at the end, as are folders made for it in vain."""
    made = [folder for folder in (destination, *destination.parents) if not folder.exists()]
    destination.mkdir(parents=True, exist_ok=True)
    staging = destination / STAGING_NAME
    try:
        staging.mkdir(exist_ok=True)
        with (staging / "lock").open("w") as lock, _locked(lock, destination):
            try:
                _empty(staging)
                yield staging
            finally:
                _remove(staging)
    except BaseException as error:
        for folder in (staging, *made):
            with suppress(OSError):  # not empty: somebody else's
                folder.rmdir()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(destination)  # a write to a full disk does not say where
        raise


@contextmanager
def _locked(lock: IO[str], destination: Path) -> Iterator[None]:
    """Hold the lock that the kernel frees however this process ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{destination}: another sm-train pack is writing to it") from None
    yield


def _empty(staging: Path) -> None:
    """Remove what a killed run left; the lock file is this run's own."""
    shutil.rmtree(staging / SHARDS_FOLDER, ignore_errors=True)
    (staging / INDEX_NAME).unlink(missing_ok=True)


def _remove(staging: Path) -> None:
    """Remove the folder, though a signal comes in between: at most one is raised."""
    try:
        shutil.rmtree(staging, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def publish(staging: Path, destination: Path) -> None:
    """Move the shards in place, then the index, which says that they are all there."""
    shards, index = destination / SHARDS_FOLDER, destination / INDEX_NAME
    try:
        (staging / SHARDS_FOLDER).replace(shards)
        (staging / INDEX_NAME).replace(index)
    except BaseException:
        if not index.exists() and not (staging / SHARDS_FOLDER).exists():
            shards.replace(staging / SHARDS_FOLDER)
        raise
    for folder in (shards, destination):
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Turn the first signal that ends a program into KeyboardInterrupt, and ignore the rest.

    A second one would break off the cleaning up. Signals that are ignored already (``nohup``)
    stay so. Only the main thread may set handlers, so only it may pack.
    """
    signals = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
