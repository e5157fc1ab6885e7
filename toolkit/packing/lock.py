"""One pack at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sm_train.entrypoints.packing.shard_builder import PACK_STATE
from sm_train.entrypoints.packing.storage import LocalFolder, Storage
from sm_train.toolkit.errors import UserError


@contextmanager
def locked(destination: Storage) -> Iterator[None]:
    """Keep other packs out of a folder; what was made for it in vain goes again.

    Two packs of the same inputs into one S3 prefix write the same bytes, so nothing is locked
    there.
    """
    if not isinstance(destination, LocalFolder):
        yield
        return
    folder = destination.path
    made = [one for one in (folder / PACK_STATE, folder, *folder.parents) if not one.exists()]
    (folder / PACK_STATE).mkdir(parents=True, exist_ok=True)
    try:
        with (folder / PACK_STATE / "lock").open("w") as lock:
            try:
                # The kernel frees it however this process ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{folder}: another sm-train pack is writing to it") from None
            yield
            _clear(folder)
    except BaseException:
        if not any(one.name != "lock" for one in (folder / PACK_STATE).glob("*")):
            _clear(folder)
        for one in made:
            with suppress(OSError):  # not empty: what is finished stays
                one.rmdir()
        raise


def _clear(folder: Path) -> None:
    """Remove the folder of records, if nothing is left in it but the lock."""
    work = folder / PACK_STATE
    with suppress(OSError):
        (work / "lock").unlink()
        work.rmdir()
