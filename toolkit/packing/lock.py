"""Locks a destination, so that only one pack writes to it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from sm_train.entrypoints.packing.claim import PackClaimedError, hold_claim
from sm_train.entrypoints.packing.shard_builder import PACK_STATE
from sm_train.entrypoints.packing.storage import LocalFolder, S3Prefix, Storage
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.errors import UserError

_LOCK_NAME = "lock"


@contextmanager
def translate_claims() -> Iterator[None]:
    """Raise the claim of another pack as the user's error."""
    try:
        yield
    except PackClaimedError as error:
        raise UserError(str(error)) from None


def job_is_active(destination: S3Prefix, job: str) -> bool:
    """Return whether a processing job is running."""
    from botocore.exceptions import ClientError

    access = destination.access
    session = open_session(access.profile, access.region or "us-east-1")
    try:
        found = session.client("sagemaker").describe_processing_job(ProcessingJobName=job)
    except ClientError as error:
        if error.response["Error"].get("Code") in ("ValidationException", "ResourceNotFound"):
            return False  # no such job
        raise
    return found["ProcessingJobStatus"] in ("InProgress", "Stopping")


@contextmanager
def lock_destination(destination: Storage) -> Iterator[None]:
    """Hold an exclusive lock on a folder or an S3 prefix.

    On errors, remove local folders that stayed empty.

    Raises:
        UserError: another pack holds the lock.
    """
    if isinstance(destination, S3Prefix):
        with translate_claims(), hold_claim(destination, partial(job_is_active, destination)):
            yield
        return
    assert isinstance(destination, LocalFolder)
    folder = destination.path
    state = folder / PACK_STATE
    created = [path for path in (state, folder, *folder.parents) if not path.exists()]
    state.mkdir(parents=True, exist_ok=True)
    try:
        with (state / _LOCK_NAME).open("a") as lock:
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
