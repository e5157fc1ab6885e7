"""Starts a run's next job, once, whoever else tries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from sm_train.estimators.config.naming import job_name
from sm_train.estimators.config.placement import placements
from sm_train.estimators.request.training import TrainingRequest
from sm_train.toolkit.aws.session import for_region, translate_aws_errors
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.jobs.launch_record import (
    CLAIM_SECONDS,
    FREE,
    GIVEN_UP,
    ClaimedError,
    LaunchRecord,
    claim,
    give_up,
    read_claim,
    release,
)
from sm_train.toolkit.jobs.training_job import (
    CAUSE_TAG,
    CHAIN_TAG,
    FROM_STEP_TAG,
    described,
    is_foreign,
)
from sm_train.toolkit.runs.remediation import StartJob


class QuotaError(UserError):
    """The account may have no such machines in the region."""


def start_next_job(session: Any, bucket: str, record: LaunchRecord, start: StartJob) -> str:
    """Start the stage's next job by what is staged already; returns its name.

    ``session`` and ``bucket`` are those of the run's own place, wherever the job goes. A name is
    claimed once, and the claim says at which place: of two that start the same attempt one job
    comes, whatever places they wanted.

    Raises:
        QuotaError: the account may have no such machines there.
        UserError: somebody else is starting it, its stage is not staged, or AWS refuses.
    """
    region = region_of(session, record, start.place)
    start = resolve_job_name(session, bucket, record.document["name"], region, start)
    request = recorded_request(record, start)
    name: str = request["TrainingJobName"]
    claimed = replace(record, place=start.place)
    mine = claim(session, bucket, name, claimed)
    with release_claim_on_rejection(session, bucket, name, claimed, mine):
        create(for_region(session, region), request)
    return name


@contextmanager
def release_claim_on_rejection(
    session: Any, bucket: str, job: str, record: LaunchRecord, mine: str
) -> Iterator[None]:
    """Free the job's name, that ``mine`` claimed, where AWS clearly says that it starts no job."""
    try:
        yield
    except UserError as error:
        # A network that was away, or an error of AWS's own, may have started it all the same.
        if error.exit_code != ExitCode.UNEXPECTED:
            release(session, bucket, job, record, mine)
        raise


def region_of(session: Any, record: LaunchRecord, place: int) -> str:
    """The region of one of the run's places; ``session`` is that of its own."""
    return placements(record.config, session.region_name)[place].region


def resolve_job_name(session: Any, bucket: str, run: str, region: str, start: StartJob) -> StartJob:
    """``start``, with the next number if a job that is not of this run has its name in ``region``,
    or if somebody claimed it for another place and never started it.

    Raises:
        ClaimedError: somebody did start it at another place, or is about to.
    """
    name = job_name(run, start.stage, start.attempt)
    if is_foreign(for_region(session, region), name):
        later = replace(start, attempt=start.attempt + 1)
        return resolve_job_name(session, bucket, run, region, later)
    before = read_claim(session, bucket, run, name)
    if before is None or before.record.place in (start.place, FREE):
        return start
    if before.record.place != GIVEN_UP:
        elsewhere = region_of(session, before.record, before.record.place)
        started = described(for_region(session, elsewhere), name) is not None
        if started or before.age < CLAIM_SECONDS:
            raise ClaimedError(f"{name}: somebody else starts it in {elsewhere}; look again")
        give_up(session, bucket, name, before)
    later = replace(start, attempt=start.attempt + 1)
    return resolve_job_name(session, bucket, run, region, later)


def recorded_request(record: LaunchRecord, start: StartJob) -> TrainingRequest:
    """The request of the stage's next job.

    Raises:
        UserError: the code of that stage is not staged.
    """
    requests = [record.requests, *record.elsewhere][start.place]
    if start.stage not in requests:
        raise UserError(
            f"{start.stage}: it starts another way than the stages before, so its code is not "
            f"staged; `sm-train submit` the run file with --stage {start.stage}"
        )
    return with_attempt(deepcopy(requests[start.stage]), record.document["name"], start)


def with_attempt(request: TrainingRequest, run: str, start: StartJob) -> TrainingRequest:
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
        QuotaError: the account may have no such machines there.
        UserError: AWS refuses otherwise.
    """
    from botocore.exceptions import ClientError

    with translate_aws_errors("CreateTrainingJob"):
        try:
            session.client("sagemaker").create_training_job(**request)
        except ClientError as error:
            said = error.response["Error"]
            if said["Code"] == "ResourceLimitExceeded":
                raise QuotaError(
                    f"CreateTrainingJob in {session.region_name}: {said['Message']}; ask for a "
                    "higher quota, or take fewer machines",
                    ExitCode.CAPACITY,
                ) from None
            if said["Code"] != "ResourceInUse":
                raise
