"""Whether a failed job is worth another one: by SageMaker's reason, else by its log."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sm_train.toolkit.platforms.sagemaker.job_causes import (
    cause_of_failure,
    failed_on_infrastructure,
)
from sm_train.toolkit.records.training_job import TrainingJob

from tests.conftest import Aws
from tests.support.aws.described_jobs import described
from tests.support.moto_server import aws_session

NAME = "demo--256px-0001"


def failed(reason: str) -> TrainingJob:
    description = {
        "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:345678901234:training-job/{NAME}",
        "FailureReason": reason,
        "SecondaryStatus": "Failed",
        "CreationTime": datetime(2026, 11, 1, tzinfo=UTC),
    }
    return described(NAME, "Failed", description)


@pytest.mark.parametrize(
    ("reason", "code", "retryable", "is_infrastructure"),
    [
        ("CapacityError: Unable to provision ML compute capacity.", "capacity", True, False),
        ("InternalServerError: We encountered an internal error.", "internal-error", True, True),
        ("AlgorithmError: ExecuteUserScriptError", "unknown", False, False),
        # Texts that AWS is assumed to write: it documents none of them.
        ("AlgorithmError: Infrastructure health check failed.", "infrastructure", True, True),
        ("ClientError: GPU health check failed on algo-2.", "infrastructure", True, True),
        ("ClientError: Insufficient capacity.", "infrastructure", True, True),
        ("ClientError: CannotPullContainerError: manifest unknown", "unknown", False, False),
        (
            'AlgorithmError: ExecuteUserScriptError: ErrorMessage "the buffer\'s capacity"',
            "unknown",
            False,
            False,
        ),
        ("", "unknown", False, False),
    ],
)
def test_the_reason_decides_and_an_unreadable_log_allows_no_other_job(
    aws: Aws,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    code: str,
    retryable: bool,
    is_infrastructure: bool,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    for operation in ("DescribeLogStreams", "GetLogEvents", "FilterLogEvents"):
        aws.error_codes[operation] = "AccessDeniedException"
    cause = cause_of_failure(aws_session(), failed(reason))
    assert (cause.code, cause.retryable) == (code, retryable)
    assert reason in cause.message
    assert failed_on_infrastructure(aws_session(), failed(reason)) == is_infrastructure
