"""What a job leaves in S3 before it starts: all that a later job of the run needs to start.

``s3://BUCKET/RUN/jobs/JOB.json`` holds the run document, each stage's request, whose code is
staged, and the number of the job's placement. Any laptop or function can start the next job from
it, and a job that starts weeks later runs the same code as the first. The object is written only
if it does not exist (If-None-Match), so it also is the exclusive claim on the job's name. A claim
whose process was killed before it started the job can be taken over at once on the same machine,
and after :data:`CLAIM_SECONDS` anywhere.

All records are in the home placement's bucket, whatever the job's region: SageMaker rejects a
duplicate name only within one region, so the first claim of a name also fixes its placement. A
name becomes free again only if AWS rejects the job.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import ValidationError
from sm_train.entrypoints.storage.lease import Holder, Lease, StoredLease, read_lease
from sm_train.entrypoints.storage.lease_files import S3LeaseFiles
from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.config.naming import job_name
from sm_train.estimators.config.placement import placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import ExitCode, UsageError, UserError
from sm_train.toolkit.records.training_job import describe_job, is_foreign
from sm_train.toolkit.run_file.run_file import declare_run_buckets

if TYPE_CHECKING:
    import boto3

_VERSION = 5

ABANDONED = -1
"""Placement of a job that will never start: its name was claimed and is spent."""

FREE = -2
"""Placement of a job that AWS rejected: its name may be claimed again for any placement."""

CLAIM_SECONDS = 900.0
"""A claim without a job expires after this: its process was killed between claim and start."""

IN_FLIGHT_SECONDS = 60.0
"""A killed process's request may still arrive at AWS for this long after its claim."""


class ClaimedError(UsageError):
    """Another process is starting this very job."""


@dataclass(frozen=True)
class LaunchRecord:
    """The run's document as submitted, and the home placement's request of each stage by name.

    Requests of other placements are computed from these. The job runs at ``placement``. With
    ``auto_advance`` `watch` starts each later stage; a resume keeps that.
    """

    document: dict[str, Any]
    requests: dict[str, TrainingRequest]
    placement: int = 0
    auto_advance: bool = False

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.document)


@dataclass(frozen=True)
class StoredRecord:
    """A record as stored, and the lease that it is: the claim of a process on the job's name."""

    record: LaunchRecord
    lease: StoredLease

    @property
    def expired(self) -> bool:
        """Whether the process that claimed the name will never start the job."""
        if self.lease.age < IN_FLIGHT_SECONDS:
            return False
        return self.lease.has_expired(CLAIM_SECONDS)


class JobNameClaim:
    """The exclusive right to start one job, held as its record in S3.

    As a context manager it acquires the claim, and releases it if AWS clearly rejects the job.
    ``session`` is in the run's home region, wherever the job starts.
    """

    def __init__(self, session: boto3.Session, bucket: str, job: str, record: LaunchRecord) -> None:
        self._session, self._bucket, self._job = session, bucket, job
        self._record = record
        files = S3LeaseFiles(store_of(session), bucket)
        key = record_key(record.document["name"], job)
        self._lease = Lease(files, key, Holder.of_this_process(), _as_document(record))

    def acquire(self) -> None:
        """Write the record as the job's, before the job is started.

        Raises:
            ClaimedError: another process is starting this job, or started it at another placement.
            UserError: AWS returns an error.
        """
        begun = time.time()
        with self._translated():
            is_taken = self._lease.take(None)
        if not is_taken:
            self._take_over()
        if time.time() - begun > CLAIM_SECONDS / 2:
            # This machine was suspended: the claim may have expired, and another process may have
            # started the job at another placement.
            raise ClaimedError(f"{self._job}: was not claimed in time; the next poll decides again")

    def _take_over(self) -> None:
        """Replace a claim that is free, or of the same placement and without a process that could
        start the job.

        A request of a process that was just killed may still arrive. Name and region are equal, so
        SageMaker then rejects the second job.
        """
        run = self._record.document["name"]
        stored = read_stored_record(self._session, self._bucket, run, self._job)
        if stored is None:
            raise ClaimedError(f"{self._job}: another process is starting it; run this again")
        placement, lease = stored.record.placement, stored.lease
        if placement != FREE and not lease.has_expired(CLAIM_SECONDS):
            raise ClaimedError(
                f"{self._job}: another process has been starting it for {lease.age:.0f} s; "
                "`sm-train status` shows it soon. If it was killed on another machine, its claim "
                f"expires after {CLAIM_SECONDS / 60:.0f} minutes"
            )
        # At another placement the region may differ, and both jobs would start.
        is_taken = False
        if placement in (self._record.placement, FREE):
            with self._translated():
                is_taken = self._lease.take(lease)
        if not is_taken:
            raise ClaimedError(f"{self._job}: another process has just claimed it; run this again")

    def release(self) -> None:
        """Free the name after AWS rejected the job, unless the claim has been taken over."""
        with self._translated():
            free = _as_document(replace(self._record, placement=FREE))
            self._lease.write(free, self._lease.version)

    def abandon(self, stored: StoredRecord) -> None:
        """Spend the name of a job that was claimed and never started: it can never be claimed.

        Raises:
            ClaimedError: another process has just taken it over.
            UserError: AWS returns an error.
        """
        spent = _as_document(replace(stored.record, placement=ABANDONED))
        try:
            with self._translated():
                written = self._lease.write(spent, stored.lease.version)
        finally:
            self._lease.holder.close()
        if written is None:
            raise ClaimedError(f"{self._job}: another process has just claimed it; run this again")

    def __enter__(self) -> JobNameClaim:
        try:
            self.acquire()
        except BaseException:
            self._lease.holder.close()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a network or internal error the job may have started, so the claim stays.
        rejected = isinstance(error, UserError) and error.exit_code != ExitCode.UNEXPECTED
        if rejected:
            self.release()
        self._lease.holder.close(settled=rejected or error is None)

    def _translated(self) -> AbstractContextManager[None]:
        key = record_key(self._record.document["name"], self._job)
        return translate_aws_errors(f"s3://{self._bucket}/{key}")


def _as_document(record: LaunchRecord) -> dict[str, Any]:
    return {"version": _VERSION, **asdict(record)}


def first_free_attempt(
    session: boto3.Session,
    bucket: str,
    record: LaunchRecord,
    stage: str,
    attempt: int,
    *,
    region: str,
) -> int:
    """Return the first attempt from ``attempt`` on whose job name is free for ``record``, whose
    placement is in ``region``.

    A name is taken if a job of no run has it in that region, or if it was claimed for another
    placement and never started; such a claim is abandoned here.

    Raises:
        ClaimedError: another process started the job at another placement, or is starting it.
    """
    run = record.document["name"]
    while True:
        name = job_name(run, stage, attempt)
        if not is_foreign(session, name, region):
            stored = read_stored_record(session, bucket, run, name)
            if stored is None or stored.record.placement in (record.placement, FREE):
                return attempt
            if stored.record.placement != ABANDONED:
                _abandon_if_expired(session, bucket, name, stored)
        attempt += 1


def _abandon_if_expired(
    session: boto3.Session, bucket: str, name: str, stored: StoredRecord
) -> None:
    other = placements(stored.record.config, session.region_name)[stored.record.placement]
    started = describe_job(session, name, other.region) is not None
    if started or not stored.expired:
        raise ClaimedError(
            f"{name}: another process is starting it in {other.region}; run this again"
        )
    JobNameClaim(session, bucket, name, stored.record).abandon(stored)


class DamagedRecordError(UserError):
    """A launch record that cannot be read. The run file says what it would."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; give the run file instead of the run's name")
        self.problem = problem


def read_record(session: boto3.Session, bucket: str, run: str, job: str) -> LaunchRecord | None:
    """Return the job's record; None if it has none.

    Raises:
        DamagedRecordError: the record is damaged.
        UserError: AWS returns an error.
    """
    stored = read_stored_record(session, bucket, run, job)
    return None if stored is None else stored.record


def read_stored_record(
    session: boto3.Session, bucket: str, run: str, job: str
) -> StoredRecord | None:
    """Return the job's record with its ETag and age; None if it has none.

    Raises:
        UserError: the record is damaged, or AWS returns an error.
    """
    key = record_key(run, job)
    damaged = f"s3://{bucket}/{key}: damaged"
    try:
        with translate_aws_errors(f"s3://{bucket}/{key}"):
            lease = read_lease(S3LeaseFiles(store_of(session), bucket), key)
        if lease is None:
            return None
        content = lease.document
        if content.pop("version") != _VERSION:
            raise ValueError("written by another version of sm-train")
        record = msgspec.convert(content, LaunchRecord)
        config = record.config
        if not (FREE <= record.placement < len(placements(config, ""))):
            raise ValueError(f"placement: {record.placement} is none of the run's")
        if record.requests.keys() != {stage.name for stage in config.stages}:
            raise ValueError("requests: they are not those of the run's stages")
        declare_run_buckets(config)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = _first_problem(error) if isinstance(error, ValidationError) else error
        raise DamagedRecordError(f"{damaged} ({reason})") from None
    return StoredRecord(record, lease)


def _first_problem(error: ValidationError) -> str:
    """Return the first of the problems of a run file, in one line."""
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, ("document", *first["loc"]))) + f": {first['msg']}"


def record_key(run: str, job: str) -> str:
    return f"{run}/jobs/{job}.json"
