"""What every job leaves beside its run in S3 before it starts: all that going on with it takes.

``s3://BUCKET/RUN/jobs/JOB.json`` holds the run document and, of every stage, the request whose code
is staged. Any laptop or function can go on by it, and a job that comes weeks later runs the very
code of the first. It is put only where there is none (If-None-Match), so it is also the claim of
whoever is about to start the job.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from sm_train.estimators.request import TrainingRequest
from sm_train.estimators.run_config import RunConfig
from sm_train.toolkit.aws import refusals_in_words
from sm_train.toolkit.errors import UserError

_VERSION = 1

CLAIM_SECONDS = 900.0
"""A claim without a job is given up after this: its laptop was killed between the two."""

_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


class ClaimedError(UserError):
    """Somebody else is starting the very job."""


@dataclass(frozen=True)
class Record:
    """The run's document as it was submitted, and the requests of its stages by their names."""

    document: dict[str, Any]
    requests: dict[str, TrainingRequest]

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.document)


def claim(session: Any, bucket: str, job: str, record: Record) -> None:
    """Keep ``record`` as the job's, before the job is started.

    Raises:
        ClaimedError: somebody else is starting that very job now.
        UserError: AWS refuses.
    """
    from botocore.exceptions import ClientError

    key = record_key(record.document["name"], job)
    body = json.dumps({"version": _VERSION, **asdict(record)}, indent=1).encode()
    put = {"Bucket": bucket, "Key": key, "Body": body, "ContentType": "application/json"}
    s3 = session.client("s3")
    with refusals_in_words(f"s3://{bucket}/{key}"):
        try:
            s3.put_object(**put, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] not in _TAKEN:
                raise
            age = _age_seconds(s3, bucket, key)
            if age < CLAIM_SECONDS:
                raise ClaimedError(
                    f"{job}: somebody else is starting it since {age:.0f} s; `sm-train status` "
                    f"shows it soon. A start that was broken off is free again after "
                    f"{CLAIM_SECONDS / 60:.0f} minutes"
                ) from None
            # Of two that take it over, SageMaker refuses the second: the name is the same.
            s3.put_object(**put)


def read_record(session: Any, bucket: str, run: str, job: str) -> Record | None:
    """The job's record; None where there is none.

    Raises:
        UserError: it is damaged, or AWS refuses.
    """
    from botocore.exceptions import ClientError

    key = record_key(run, job)
    with refusals_in_words(f"s3://{bucket}/{key}"):
        try:
            answer = session.client("s3").get_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("NoSuchKey", "404"):
                raise
            return None
    try:
        content = json.loads(answer["Body"].read())
        if content.pop("version") != _VERSION:
            raise ValueError("of another version of sm-train")
        return Record(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"s3://{bucket}/{key}: damaged ({error}); `sm-train resume` with the run file"
        ) from None


def record_key(run: str, job: str) -> str:
    return f"{run}/jobs/{job}.json"


def _age_seconds(s3: Any, bucket: str, key: str) -> float:
    """By the server's clock alone: this laptop's may be wrong."""
    answer = s3.head_object(Bucket=bucket, Key=key)
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    written: datetime = answer["LastModified"]
    return max(0.0, (now - written).total_seconds())
