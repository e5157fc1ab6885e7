"""Takes the lease of a destination, so that one command at a time writes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from sm_train.entrypoints.data_prep.work.work_stages import LEASE_NAME, STATE_FOLDER
from sm_train.entrypoints.storage.lease import Holder, Lease, LeaseHeldError, Renewal
from sm_train.entrypoints.storage.storage import LocalFolder, S3Prefix, Storage
from sm_train.toolkit.aws.s3 import regions_of_readers
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.base.errors import UserError


def acquire_lease(destination: Storage, holder: Holder) -> Lease:
    """Take the lease of a destination for ``holder``.

    Raises:
        UserError: another command holds it.
    """
    lease = Lease(destination.lease_files, LEASE_NAME, holder)
    try:
        lease.acquire(job_is_active=partial(_job_is_active, destination))
    except LeaseHeldError as error:
        address = destination.address("").rstrip("/")
        raise UserError(f"{address}: another sm-train command is writing to it: {error}") from None
    return lease


def _job_is_active(destination: Storage, job: str) -> bool:
    """Return whether a processing job is running, in any region that may write to the bucket."""
    from botocore.exceptions import ClientError

    assert isinstance(destination, S3Prefix)
    access = destination.access
    for region in regions_of_readers(destination.address(""), access):
        client = open_session(access.profile, region).client("sagemaker")
        try:
            found = client.describe_processing_job(ProcessingJobName=job)
        except ClientError as error:
            if error.response["Error"].get("Code") in ("ValidationException", "ResourceNotFound"):
                continue  # no such job in this region
            raise
        if found["ProcessingJobStatus"] in ("InProgress", "Stopping"):
            return True
    return False


@contextmanager
def lock_destination(destination: Storage) -> Iterator[None]:
    """Hold the lease of a folder or an S3 prefix, renewed in the background.

    Remove local folders that stayed empty.

    Raises:
        UserError: another command holds it.
    """
    created = []
    if isinstance(destination, LocalFolder):
        state = destination.path / STATE_FOLDER
        folders = (state, destination.path, *destination.path.parents)
        created = [path for path in folders if not path.exists()]
    try:
        lease = acquire_lease(destination, Holder.of_this_process())
        renewal = Renewal()
        renewal.add(LEASE_NAME, lease)
        try:
            with renewal:
                yield
        finally:
            lease.release()
            lease.holder.close()
            if isinstance(destination, LocalFolder):
                with suppress(OSError):  # unfinished work stays in it
                    state.rmdir()
    except BaseException:
        for path in created:
            with suppress(OSError):  # not empty: finished shards stay
                path.rmdir()
        raise
