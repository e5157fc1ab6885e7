"""Claims an S3 prefix, so that only one pack writes below it.

The claim is an object that is created and taken over by conditional writes: of several packs
exactly one gets it (S3 user guide, "Conditional writes"). A pack on this computer renews its claim
while it runs; one that ended without releasing it is taken over at once on the same computer, and
after :data:`EXPIRES_SECONDS` on others. The claim of a processing job is valid while the job runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from sm_train.entrypoints.common import procfs
from sm_train.entrypoints.object_store.store import open_store
from sm_train.entrypoints.packing.shard_builder import PACK_STATE
from sm_train.entrypoints.packing.storage import S3Prefix

CLAIM_NAME = f"{PACK_STATE}/claim.json"
RENEW_SECONDS = 20.0
EXPIRES_SECONDS = 120.0
"""Age at which a claim that was not renewed may be taken over."""

_ATTEMPTS = 5

JobIsActive = Callable[[str], bool]
"""Returns whether the processing job of this name is running."""


class PackClaimedError(RuntimeError):
    """Another pack holds the claim; the message is one line."""


@dataclass(frozen=True)
class PackClaim:
    """Who packs: a process on ``host``, or a processing job.

    ``started`` distinguishes processes with the same number, ``token`` claims of one process.
    """

    token: str
    host: str = ""
    process: int = 0
    started: str = ""
    job: str = ""

    @classmethod
    def of_this_process(cls) -> PackClaim:
        """Return a new claim of this process."""
        process = os.getpid()
        return cls(uuid.uuid4().hex, socket.gethostname(), process, procfs.start_time(process))

    @classmethod
    def of_job(cls, job: str) -> PackClaim:
        """Return a new claim of a processing job."""
        return cls(uuid.uuid4().hex, job=job)

    @property
    def content(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def has_ended(self) -> bool:
        """Whether the claim is that of a process on this computer that has ended."""
        if self.job or self.host != socket.gethostname():
            return False
        return self.started != procfs.start_time(self.process)


@contextmanager
def hold_claim(prefix: S3Prefix, job_is_active: JobIsActive) -> Iterator[None]:
    """Hold the claim of this process, renewed in the background.

    Raises:
        PackClaimedError: another pack holds it.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    claim = PackClaim.of_this_process()
    etag = acquire(prefix, claim, job_is_active)
    stop = threading.Event()

    def renew() -> None:
        current: str | None = etag
        while current is not None and not stop.wait(RENEW_SECONDS):
            # After a failed request the claim is still valid, and the next one renews it.
            with suppress(BotoCoreError, ClientError):
                current = put_claim(prefix, CLAIM_NAME, claim, current)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        release(prefix, claim)


def acquire(prefix: S3Prefix, claim: PackClaim, job_is_active: JobIsActive) -> str:
    """Claim the prefix; return the ETag of the claim.

    Raises:
        PackClaimedError: another pack holds it.
    """
    address = prefix.address("").rstrip("/")
    for _ in range(_ATTEMPTS):
        if (etag := put_claim(prefix, CLAIM_NAME, claim, None)) is not None:
            return etag
        found = read_claim(prefix, CLAIM_NAME)
        if found is None:  # released meanwhile
            continue
        holder, age, stored = found
        if holder.job:
            # The job is created after its claim.
            is_held = age < EXPIRES_SECONDS or job_is_active(holder.job)
            who = f"the processing job {holder.job}"
        else:
            is_held = age < EXPIRES_SECONDS and not holder.has_ended
            who = f"process {holder.process} on {holder.host}"
        if is_held:
            raise PackClaimedError(f"{address}: another sm-train pack is writing to it: {who}")
        if (etag := put_claim(prefix, CLAIM_NAME, claim, stored)) is not None:
            return etag
    raise PackClaimedError(f"{address}: other sm-train packs are starting to write to it")


def release(prefix: S3Prefix, claim: PackClaim) -> None:
    """Remove the claim if it is still held."""
    found = read_claim(prefix, CLAIM_NAME)
    if found is not None and found[0] == claim:
        prefix.remove(CLAIM_NAME)


def put_claim(prefix: S3Prefix, name: str, claim: PackClaim, etag: str | None) -> str | None:
    """Write the claim ``name`` if there is none, or over the one with ``etag``.

    Return the new ETag; None if another process was faster.
    """
    store = open_store(prefix.access)
    return store.put_if(prefix.bucket, prefix.prefix + name, claim.content, etag=etag)


def read_claim(prefix: S3Prefix, name: str) -> tuple[PackClaim, float, str] | None:
    """Return the claim, its age in seconds by S3's clock and its ETag; None if there is none."""
    stored = open_store(prefix.access).get_if_exists(prefix.bucket, prefix.prefix + name)
    if stored is None:
        return None
    return PackClaim(**json.loads(stored.content)), stored.age, stored.etag
