"""Helpers of the tests of remediation, which other tests use as well."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sm_train.toolkit.records.training_job import TrainingJob

from tests.support.aws.described_jobs import described

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def job(
    attempt: int,
    status: str,
    *,
    ended_ago: float = 7200,
    secondary: str = "",
    more: dict[str, Any] | None = None,
    **tags: str,
) -> TrainingJob:
    description: dict[str, Any] = {
        "SecondaryStatus": secondary or ("Training" if status == "InProgress" else ""),
        "CreationTime": NOW - timedelta(days=1),
        "TrainingStartTime": NOW - timedelta(days=1),
        "TrainingEndTime": NOW - timedelta(seconds=ended_ago),
    }
    job_tags = {f"sm-train:{key.replace('_', '-')}": value for key, value in tags.items()}
    return described(f"demo--a-{attempt:04d}", status, description | (more or {}), job_tags)
