"""Starts a run's next job, once, whoever else tries."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

from sm_train.estimators.request import TrainingRequest, job_name
from sm_train.toolkit.aws import refusals_in_words
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.job_records import Record, claim
from sm_train.toolkit.recovery import Start
from sm_train.toolkit.training_jobs import (
    CAUSE_TAG,
    CHAIN_TAG,
    FROM_STEP_TAG,
    is_foreign,
)


def repeat(session: Any, bucket: str, record: Record, start: Start) -> str:
    """Start the stage's next job by what is staged already; returns its name.

    Raises:
        UserError: somebody else is starting it, its stage is not staged, or AWS refuses.
    """
    start = past_foreign_names(session, record.document["name"], start)
    request = recorded_request(record, start)
    name: str = request["TrainingJobName"]
    claim(session, bucket, name, record)
    create(session, request)
    return name


def past_foreign_names(session: Any, run: str, start: Start) -> Start:
    """``start``, with the next number if a job that is not of this run has its name."""
    while is_foreign(session, job_name(run, start.stage, start.attempt)):
        start = replace(start, attempt=start.attempt + 1)
    return start


def recorded_request(record: Record, start: Start) -> TrainingRequest:
    """The request of the stage's next job.

    Raises:
        UserError: the code of that stage is not staged.
    """
    if start.stage not in record.requests:
        raise UserError(
            f"{start.stage}: it starts another way than the stages before, so its code is not "
            f"staged; `sm-train submit` the run file with --stage {start.stage}"
        )
    return numbered(deepcopy(record.requests[start.stage]), record.document["name"], start)


def numbered(request: TrainingRequest, run: str, start: Start) -> TrainingRequest:
    """``request`` as the job that ``start`` asks for."""
    said = {FROM_STEP_TAG: str(start.from_step), CAUSE_TAG: start.cause}
    if start.chain:
        said[CHAIN_TAG] = "on"
    others = [tag for tag in request["Tags"] if tag["Key"] not in (*said, CHAIN_TAG)]
    tags = others + [{"Key": key, "Value": value} for key, value in said.items()]
    name = job_name(run, start.stage, start.attempt)
    return request | {"TrainingJobName": name, "Tags": tags}


def create(session: Any, request: TrainingRequest) -> None:
    """Create the job. One of that name may be there: of an earlier try whose answer was lost, or of
    somebody who was quicker; either way it is the one that was wanted.

    Raises:
        UserError: AWS refuses.
    """
    from botocore.exceptions import ClientError

    with refusals_in_words("CreateTrainingJob"):
        try:
            session.client("sagemaker").create_training_job(**request)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceInUse":
                raise
