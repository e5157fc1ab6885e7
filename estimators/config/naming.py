"""Names and S3 locations that a run file determines: jobs, staged code, checkpoints."""

from __future__ import annotations

from datetime import datetime

from sm_train.estimators.config.schema import RunConfig, StageSection

ROLE_NOT_SET = "arn:aws:iam::000000000000:role/ROLE-NOT-SET"
"""Stands in a dry run for a role that the run file does not name; never submitted."""


def staging_bucket(config: RunConfig, region: str) -> str:
    """The run file's bucket, or SageMaker's default bucket of the role's account."""
    account = (config.role or ROLE_NOT_SET).split(":")[4]
    return config.bucket or f"sagemaker-{region}-{account}"


def job_name(run: str, stage: str, attempt: int) -> str:
    """The name of a stage's job. SageMaker takes a name once, so of two that start the same attempt
    one is refused: a stage never has two live jobs, whoever starts them. Names of runs and stages
    have no two hyphens in a row, so no other run's stage comes to the same.
    """
    return f"{run}--{stage}-{attempt:04d}"


def code_prefix(run: str) -> str:
    """Below it in the bucket, each submission keeps its code in a folder of its own."""
    return f"{run}/code"


def staging_uri(config: RunConfig, stage: StageSection, region: str, now: datetime) -> str:
    """The folder in which a submission of ``stage`` keeps its code, named as the SDK does."""
    bucket = staging_bucket(config, region)
    return f"s3://{bucket}/{code_prefix(config.name)}/{stage.name}-{now:%Y%m%d%H%M%S}/input"


def checkpoint_uri(config: RunConfig, stage: StageSection, bucket: str) -> str:
    """Where a stage's checkpoints go: known before any job, the same for every restart."""
    return f"s3://{bucket}/{config.name}/checkpoints/{stage.name}"
