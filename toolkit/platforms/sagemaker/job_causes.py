"""Why a job on SageMaker failed, and whether another one may succeed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.records.job_logs import cause_of
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.training_job import job_logs
from sm_train.toolkit.runs.remediation import Cause

if TYPE_CHECKING:
    import boto3


def cause_of_failure(session: boto3.Session, job: RunJob) -> Cause:
    """Diagnose a failed job.

    The first word of SageMaker's failure reason is the type of the error. Errors of the algorithm
    are diagnosed from the job's logs: only a cause known to be transient is worth another job.
    """
    reason = job.failure_reason or "failed without a reason"
    error_type = reason.partition(":")[0]
    if error_type == "CapacityError":
        return Cause("capacity", f"got no instances ({reason})", retryable=True)
    if error_type == "InternalServerError":
        message = f"failed because of an error in SageMaker ({reason})"
        return Cause("internal-error", message, retryable=True)
    if _INFRASTRUCTURE.search(reason) and not _PROGRAM.search(reason):
        message = f"failed because of its instances ({reason})"
        return Cause("infrastructure", message, retryable=True)
    try:
        found = cause_of(job_logs(session_in_region(session, job.region), job.name))
    except UserError as error:
        return Cause("unknown", f"failed: {reason} (its log: {error})", retryable=False)
    if found is None:
        message = f"failed: {reason} (its log: not read, the analysis of logs is not installed)"
        return Cause("unknown", message, retryable=False)
    retryable = bool(found.retryable) and found.confidence in ("high", "medium")
    return Cause(found.cause, f"failed: {found.title} ({reason})", retryable)


_INFRASTRUCTURE = re.compile(
    r"\b(?:infrastructure|health[ -]?checks?|unhealthy|hardware|capacity)\b",
    re.IGNORECASE,
)
"""Words of reasons that name the platform's machines; AWS documents no list of them."""

_PROGRAM = re.compile("ExecuteUserScriptError|ErrorMessage|exit code", re.IGNORECASE)
"""What a reason has if it quotes the program, whose words say nothing about machines."""


def failed_on_infrastructure(session: boto3.Session, job: RunJob) -> bool:
    """Return whether hardware or AWS failed the job: another job may succeed without a change.

    A job that got no instances has not run on any.
    """
    cause = cause_of_failure(session, job)
    return cause.retryable and cause.code != "capacity"
