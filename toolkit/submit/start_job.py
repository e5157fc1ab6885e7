"""Starts a run's next job exactly once, however many processes try."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_train.estimators.config.naming import job_name
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import CapacityError
from sm_train.toolkit.records.launch_record import JobNameClaim, LaunchRecord, first_free_attempt
from sm_train.toolkit.records.training_job import AUTO_ADVANCE_TAG, CAUSE_TAG, FROM_STEP_TAG
from sm_train.toolkit.runs.remediation import StartJob

if TYPE_CHECKING:
    import boto3


class QuotaError(CapacityError):
    """The account's quota does not allow these instances in the region."""


@dataclass(frozen=True)
class JobLaunch:
    """A stage's next job with all it takes to start it.

    ``config`` and ``region`` are those where the job starts. ``request`` is the request of the
    stage's first job there. ``bucket`` is the run's home bucket, which holds the launch records.
    """

    run: str
    start: StartJob
    config: RunConfig
    region: str
    request: TrainingRequest
    record: LaunchRecord
    bucket: str


def start_next_job(session: boto3.Session, launch: JobLaunch) -> str:
    """Start the job with the code that is staged already, and return its name.

    ``session`` is in the run's home region, wherever the job starts. A name is claimed once, for
    one cluster and region: of two processes that start the same attempt one succeeds, whichever
    they chose.

    Raises:
        QuotaError: the account's quota does not allow these instances there.
        UserError: another process is starting the job, or AWS returns an error.
    """
    launch = resolve_job_name(session, launch)
    request = with_attempt(launch.request, launch.run, launch.start)
    name: str = request["TrainingJobName"]
    with JobNameClaim(session, launch.bucket, name, launch.record):
        create_job(session, request, launch.region)
    return name


def resolve_job_name(session: boto3.Session, launch: JobLaunch) -> JobLaunch:
    """Return ``launch`` with the next attempt whose job name is free.

    Raises:
        ClaimedError: another process started the job with another cluster or region, or is
            starting it.
    """
    start = launch.start
    attempt = first_free_attempt(
        session, launch.bucket, launch.record, start.stage, start.attempt, region=launch.region
    )
    return replace(launch, start=replace(start, attempt=attempt))


def with_attempt(request: TrainingRequest, run: str, start: StartJob) -> TrainingRequest:
    """Return ``request`` with the name and the tags of ``start``."""
    tags = {FROM_STEP_TAG: str(start.from_step), CAUSE_TAG: start.cause}
    if start.auto_advance:
        tags[AUTO_ADVANCE_TAG] = "on"
    kept = [tag for tag in request["Tags"] if tag["Key"] not in (*tags, AUTO_ADVANCE_TAG)]
    numbered = deepcopy(request)
    numbered["TrainingJobName"] = job_name(run, start.stage, start.attempt)
    numbered["Tags"] = kept + [{"Key": key, "Value": value} for key, value in tags.items()]
    return numbered


def create_job(session: boto3.Session, request: TrainingRequest, region: str) -> None:
    """Create the job in ``region``.

    If a job of that name exists, from an earlier attempt whose response was lost or from another
    process, it is the job that was wanted.

    Raises:
        QuotaError: the account's quota does not allow these instances.
        UserError: AWS returns another error.
    """
    from botocore.exceptions import ClientError

    with translate_aws_errors("CreateTrainingJob"):
        try:
            session.client("sagemaker", region_name=region).create_training_job(**request)
        except ClientError as error:
            details = error.response["Error"]
            if details["Code"] == "ResourceLimitExceeded":
                raise QuotaError(
                    f"CreateTrainingJob in {region}: {details['Message']}; request a higher "
                    "quota, or use fewer instances"
                ) from None
            if details["Code"] != "ResourceInUse":
                raise
