"""Names and S3 locations that a run file determines: jobs, staged code, checkpoints."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection

ROLE_NOT_SET = "arn:aws:iam::000000000000:role/ROLE-NOT-SET"
"""Placeholder in a dry run of a run file without a role; never submitted."""


def staging_bucket(config: RunConfig, region: str) -> str:
    """Return the run file's bucket, or SageMaker's default bucket of the role's account."""
    account = (config.role or ROLE_NOT_SET).split(":")[4]
    return config.bucket or f"sagemaker-{region}-{account}"


def job_name(run: str, stage: str, attempt: int) -> str:
    """Return the name of a stage's job.

    SageMaker accepts a name once, so of two processes that start the same attempt one is rejected:
    a stage never has two live jobs. Names of runs and stages contain no double hyphen, so the
    result is unique to run and stage.
    """
    return f"{run}--{stage}-{attempt:04d}"


def short_name(run: str) -> str:
    """Return the name of ``run`` with at most 30 characters; no other run has the same."""
    if len(run) <= 30:
        return run
    return f"{run[:23].rstrip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def measuring_run(run: str) -> str:
    """Return the name of the run that holds the measurements of ``run`` (`sm-train measure`)."""
    return f"{short_name(run)}-measure"


def canary_prefix(run: str) -> str:
    """Return the start of the names of the canaries of ``run`` (`sm-train doctor --canary`)."""
    return f"{short_name(run)}-canary-"


def is_canary(run: str) -> bool:
    """Return whether a run is the canary of another one."""
    return re.search(r"-canary-\d+$", run) is not None


def code_prefix(run: str) -> str:
    """Return the key prefix in the bucket below which each submission stages its code."""
    return f"{run}/code"


def staging_uri(config: RunConfig, stage: StageSection, region: str, now: datetime) -> str:
    """Return the folder where a submission of ``stage`` stages its code, named as the SDK does."""
    bucket = staging_bucket(config, region)
    return f"s3://{bucket}/{code_prefix(config.name)}/{stage.name}-{now:%Y%m%d%H%M%S}/input"


def checkpoint_uri(config: RunConfig, stage: StageSection, bucket: str) -> str:
    """Return the prefix of a stage's checkpoints, the same for every attempt."""
    return f"s3://{bucket}/{config.name}/checkpoints/{stage.name}"
