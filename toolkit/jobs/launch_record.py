"""What every job leaves beside its run in S3 before it starts: all that going on with it takes.

``s3://BUCKET/RUN/jobs/JOB.json`` holds the run document and, of every stage, the request whose code
is staged, at every place that the run may go to. Any laptop or function can go on by it, and a job
that comes weeks later runs the very code of the first. It is put only where there is none
(If-None-Match), so it is also the claim of whoever is about to start the job.

All records lie in the bucket of the run's own place, also those of jobs elsewhere: SageMaker takes
a name once in each region, so the first claim of a name also says where its job goes, for ever;
unless AWS refused to start it there: then the name is free again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import uuid4

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.training import TrainingRequest
from sm_train.toolkit.aws.session import translate_aws_errors
from sm_train.toolkit.errors import UserError

_VERSION = 2

GIVEN_UP = -1
"""The place of a job that will not be: its name was claimed for one and is spent."""

FREE = -2
"""The place of a job that AWS refused to start: its name may be claimed again for any."""

CLAIM_SECONDS = 900.0
"""A claim without a job is given up after this: its laptop was killed between the two."""

_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


class ClaimedError(UserError):
    """Somebody else is starting the very job."""


@dataclass(frozen=True)
class LaunchRecord:
    """The run's document as it was submitted, and the requests of its stages by their names.

    ``elsewhere`` has the same for each fallback; the job is at ``place``, 0 for the run's own.
    """

    document: dict[str, Any]
    requests: dict[str, TrainingRequest]
    elsewhere: list[dict[str, TrainingRequest]] = field(default_factory=list)
    place: int = 0

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.document)


@dataclass(frozen=True)
class Claim:
    """A job's record as it lies there: ``etag`` is of its very bytes, ``age`` in seconds by the
    server's clock alone, since this laptop's may be wrong.
    """

    record: LaunchRecord
    etag: str
    age: float


def claim(session: Any, bucket: str, job: str, record: LaunchRecord) -> str:
    """Keep ``record`` as the job's, before the job is started; returns what :func:`release` takes.

    Raises:
        ClaimedError: somebody else is starting that very job now, or did so at another place.
        UserError: AWS refuses.
    """
    begun = time.time()
    mine = _put(session, bucket, job, record, IfNoneMatch="*")
    if mine is None:
        before = read_claim(session, bucket, record.document["name"], job)
        if before is None:
            raise ClaimedError(f"{job}: somebody else is starting it; look again")
        if before.record.place != FREE and before.age < CLAIM_SECONDS:
            raise ClaimedError(
                f"{job}: somebody else is starting it since {before.age:.0f} s; `sm-train status` "
                f"shows it soon. A start that was broken off is free again after "
                f"{CLAIM_SECONDS / 60:.0f} minutes"
            )
        # Of two that take it over, SageMaker refuses the second: name and region are the same.
        if before.record.place in (record.place, FREE):
            mine = _put(session, bucket, job, record, IfMatch=before.etag)
        if mine is None:
            raise ClaimedError(f"{job}: somebody else has just taken it over; look again")
    if time.time() - begun > CLAIM_SECONDS / 2:
        # This machine slept: by now the claim may be somebody else's, and the job elsewhere.
        raise ClaimedError(f"{job}: was not claimed in time; the next look decides anew")
    return mine


def release(session: Any, bucket: str, job: str, record: LaunchRecord, mine: str) -> None:
    """Free the name that ``mine`` claimed: AWS has refused to start the job. Somebody who has taken
    it over since keeps it.
    """
    _put(session, bucket, job, replace(record, place=FREE), IfMatch=mine)


def give_up(session: Any, bucket: str, job: str, before: Claim) -> None:
    """Spend the name of a job that was claimed and never started: it cannot be claimed any more.

    Raises:
        ClaimedError: somebody else has just taken it over.
        UserError: AWS refuses.
    """
    spent = replace(before.record, place=GIVEN_UP)
    if _put(session, bucket, job, spent, IfMatch=before.etag) is None:
        raise ClaimedError(f"{job}: somebody else has just taken it over; look again")


def _put(session: Any, bucket: str, job: str, record: LaunchRecord, **condition: str) -> str | None:
    """Put the record under the condition; its ETag, or None where the condition did not hold."""
    from botocore.exceptions import ClientError

    key = record_key(record.document["name"], job)
    # Two claims never have the same bytes, and so never the same ETag.
    content = {"version": _VERSION, "claim": uuid4().hex, **asdict(record)}
    with translate_aws_errors(f"s3://{bucket}/{key}"):
        try:
            answer = session.client("s3").put_object(
                Bucket=bucket,
                Key=key,
                Body=json.dumps(content, indent=1).encode(),
                ContentType="application/json",
                **condition,
            )
        except ClientError as error:
            if error.response["Error"]["Code"] not in _TAKEN:
                raise
            return None
    return str(answer["ETag"])


def read_record(session: Any, bucket: str, run: str, job: str) -> LaunchRecord | None:
    """The job's record; None where there is none.

    Raises:
        UserError: it is damaged, or AWS refuses.
    """
    found = read_claim(session, bucket, run, job)
    return None if found is None else found.record


def read_claim(session: Any, bucket: str, run: str, job: str) -> Claim | None:
    """The job's record with what tells it from others; None where there is none.

    Raises:
        UserError: it is damaged, or AWS refuses.
    """
    from botocore.exceptions import ClientError

    key = record_key(run, job)
    with translate_aws_errors(f"s3://{bucket}/{key}"):
        try:
            answer = session.client("s3").get_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("NoSuchKey", "404"):
                raise
            return None
        body = answer["Body"].read()
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    written: datetime = answer["LastModified"]
    try:
        content = json.loads(body)
        if content.pop("version") != _VERSION:
            raise ValueError("of another version of sm-train")
        content.pop("claim")
        record = LaunchRecord(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"s3://{bucket}/{key}: damaged ({error}); `sm-train resume` with the run file"
        ) from None
    return Claim(record, answer["ETag"], max(0.0, (now - written).total_seconds()))


def record_key(run: str, job: str) -> str:
    return f"{run}/jobs/{job}.json"
