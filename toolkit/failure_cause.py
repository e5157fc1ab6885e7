"""Why a job failed, and whether another one would do better."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.recovery import Cause
from sm_train.toolkit.training_jobs import TrainingJob


def cause_of_failure(session: Any, job: TrainingJob) -> Cause:
    """By SageMaker's reason, whose first word says whose fault it was."""
    reason = job.failure or "failed without a reason"
    kind = reason.partition(":")[0]
    if kind == "CapacityError":
        return Cause("capacity", f"found no machines ({reason})", retryable=True)
    if kind == "InternalServerError":
        return Cause(
            "internal-error", f"failed by SageMaker's own error ({reason})", retryable=True
        )
    return Cause("program", f"failed: {reason}", retryable=False)
