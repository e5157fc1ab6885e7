"""Training jobs of which a test states only what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun
from sm_train.toolkit.records.launch_record import LaunchRecord
from sm_train.toolkit.records.training_job import TrainingJob

CREATED = datetime(2026, 11, 1, tzinfo=UTC)


def described(
    name: str, status: str, description: Mapping[str, Any], tags: Mapping[str, str] | None = None
) -> TrainingJob:
    """Return a job by its name (RUN--STAGE-NUMBER) and a part of DescribeTrainingJob."""
    run, _, rest = name.partition("--")
    defaults = {
        "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:training-job/{name}",
        "CreationTime": CREATED,
        "ResourceConfig": {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 4},
        "CheckpointConfig": {"S3Uri": f"s3://ai-bucket/{run}/checkpoints"},
    }
    stage = rest.rpartition("-")[0]
    return TrainingJob.of(name, run, stage, status, tags or {}, defaults | dict(description))


def run_on_sagemaker(
    config: RunConfig, record: LaunchRecord | None = None, session: Any = None
) -> SageMakerRun:
    """Return a run in us-east-1 whose jobs have not been listed."""
    return SageMakerRun(
        target=config.name,
        config=config,
        region="us-east-1",
        bucket="ai-bucket",
        session=session,
        record=record,
    )
