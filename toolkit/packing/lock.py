"""Locks a local destination, so that only one pack writes to it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sm_train.entrypoints.packing.shard_builder import PACK_STATE
from sm_train.entrypoints.packing.storage import LocalFolder, Storage
from sm_train.toolkit.errors import UserError

_LOCK_NAME = "lock"


@contextmanager
def lock_destination(destination: Storage) -> Iterator[None]:
    """Hold an exclusive lock on a local folder; on errors, remove folders that stayed empty.

    An S3 prefix is not locked: concurrent packs of the same inputs write the same bytes.

    Raises:
        UserError: another pack holds the lock.
    """
    if not isinstance(destination, LocalFolder):
        yield
        return
    folder = destination.path
    state = folder / PACK_STATE
    created = [path for path in (state, folder, *folder.parents) if not path.exists()]
    state.mkdir(parents=True, exist_ok=True)
    try:
        with (state / _LOCK_NAME).open("w") as lock:
            try:
                # The kernel releases the lock however this process ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{folder}: another sm-train pack is writing to it") from None
            yield
            _remove_if_empty(state)
    except BaseException:
        if not any(path.name != _LOCK_NAME for path in state.glob("*")):
            _remove_if_empty(state)
        for path in created:
            with suppress(OSError):  # not empty: finished shards stay
                path.rmdir()
        raise


def _remove_if_empty(state: Path) -> None:
    """Remove the lock, and the state folder if nothing else is in it."""
    with suppress(OSError):
        (state / _LOCK_NAME).unlink()
        state.rmdir()
