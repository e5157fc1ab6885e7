"""Why a job failed, and whether another one would do better."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.diagnose.job_logs import diagnose_job
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import TrainingJob
from sm_train.toolkit.runs.remediation import Cause


def cause_of_failure(session: Any, job: TrainingJob) -> Cause:
    """By SageMaker's reason, whose first word says whose fault it was; what it calls the program's
    own, by the job's logs. Only a cause that is known to pass is worth the dollars of another job.
    """
    reason = job.failure or "failed without a reason"
    kind = reason.partition(":")[0]
    if kind == "CapacityError":
        return Cause("capacity", f"found no machines ({reason})", retryable=True)
    if kind == "InternalServerError":
        return Cause(
            "internal-error", f"failed by SageMaker's own error ({reason})", retryable=True
        )
    try:
        found = diagnose_job(session, job.name)
    except UserError as error:
        return Cause("unknown", f"failed: {reason} (its log: {error})", retryable=False)
    retryable = bool(found.retryable) and found.confidence in ("high", "medium")
    return Cause(found.cause, f"failed: {found.title} ({reason})", retryable)
