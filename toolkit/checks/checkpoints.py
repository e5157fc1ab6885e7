"""Checks existing checkpoints under a stage's prefix: a job resumes from the latest one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, newest_listed, shard_bytes
from sm_train.entrypoints.storage.store import ObjectStore, store_of
from sm_train.estimators.config.naming import checkpoint_uri, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training_request import RUN_TAG
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.memory.memory_fit import plan_for

if TYPE_CHECKING:
    import boto3
    from types_boto3_sagemaker.client import SageMakerClient
    from types_boto3_sagemaker.type_defs import DescribeTrainingJobResponseTypeDef

CHECKPOINTS_OTHER_MODEL = Check("checkpoints-other-model", ("error",))
CHECKPOINTS_OTHER_RUN = Check("checkpoints-other-run", ("warning",))
CHECKPOINTS_BEYOND = Check("checkpoints-beyond", ("warning",))
CHECKPOINTS_RESUMED = Check("checkpoints-resumed", ("info",))


@dataclass(frozen=True)
class CheckpointSummary:
    """A complete checkpoint's step and the total size of its tensors, from its marker file.

    The size is 0 for one of a script of the user's own.
    """

    step: int
    tensor_bytes: int


def checkpoint_findings(
    config: RunConfig, session: boto3.Session, region: str
) -> Iterator[Finding]:
    """Check for each stage which checkpoint its job would resume from.

    Raises:
        ClientError: S3 or SageMaker rejects a request.
    """
    bucket = staging_bucket(config, region)
    for index, stage in enumerate(config.stages):
        uri = checkpoint_uri(config, stage, bucket)
        checkpoint = latest_checkpoint(store_of(session), uri)
        if checkpoint is not None:
            where = f"stages[{index}]"
            job = _latest_job(session.client("sagemaker"), config, stage)
            yield from _stage_findings(config, stage, checkpoint, job, where, uri)


def _stage_findings(
    config: RunConfig,
    stage: StageSection,
    checkpoint: CheckpointSummary,
    job: DescribeTrainingJobResponseTypeDef | None,
    where: str,
    uri: str,
) -> Iterator[Finding]:
    expected = _expected_bytes(config, stage) if checkpoint.tensor_bytes else None
    has = f"{uri} has a checkpoint of step {checkpoint.step:,}"
    ratio = checkpoint.tensor_bytes / expected if expected else 1.0
    if expected and not 1 / _SIZE_RATIO < ratio < _SIZE_RATIO:
        yield CHECKPOINTS_OTHER_MODEL.found(
            "error",
            where,
            f"{has} with {checkpoint.tensor_bytes / 1e9:.3g} GB, but {config.model.preset} "
            f"checkpoints have {expected / 1e9:.3g} GB: it belongs to another model",
            "give the run another name",
        )
        return
    if checkpoint.step >= stage.max_steps:
        yield CHECKPOINTS_BEYOND.found(
            "warning",
            where,
            f"{has}, but {stage.name} ends at step {stage.max_steps:,}",
            "start the next stage, raise max_steps, or give the run another name",
        )
    data = _data_uri(job) if job else None
    if job is None:
        reason = f"no job in this region is tagged with run {config.name}"
    elif data != config.data.uri:
        reason = f"its job {job['TrainingJobName']} read {data}"
    else:
        yield CHECKPOINTS_RESUMED.found(
            "info",
            where,
            f"{has} of {stage.max_steps:,}: the job resumes from it",
            "give the run another name to start over",
        )
        return
    yield CHECKPOINTS_OTHER_RUN.found(
        "warning",
        where,
        f"{has}, but {reason}: it may belong to another run",
        "give the run another name, unless this is intended",
    )


_SIZE_RATIO = 1.38
"""Tolerance on the size: checkpoints with and without EMA weights differ by 16 ÷ 12 ≈ 1.33."""


def _expected_bytes(config: RunConfig, stage: StageSection) -> int | None:
    plan = plan_for(config, stage.resolution)
    if plan is None:
        return None
    optimizer = config.training.optimizer.name
    return plan.checkpoint_bytes(ema=config.training.ema_decay > 0, optimizer=optimizer)


def latest_checkpoint(store: ObjectStore, uri: str) -> CheckpointSummary | None:
    """Return the newest complete checkpoint under ``uri``.

    Raises:
        ClientError: S3 rejects a request.
    """
    bucket, prefix = split_uri(f"{uri.rstrip('/')}/")
    sizes = {
        stored.key.removeprefix(prefix): stored.bytes for stored in store.objects(bucket, prefix)
    }
    newest = newest_listed(sizes, lambda name: store.get(bucket, f"{prefix}{name}/{MARKER}"))
    if newest.marker is None:
        return None
    return CheckpointSummary(newest.marker.step, shard_bytes(newest.marker.files))


def _latest_job(
    sagemaker: SageMakerClient, config: RunConfig, stage: StageSection
) -> DescribeTrainingJobResponseTypeDef | None:
    """Return the stage's latest job that is tagged with the run."""
    name = f"{config.name}--{stage.name}-"
    stage_jobs = re.compile(rf"{re.escape(name)}\d{{4,}}")
    page = sagemaker.list_training_jobs(
        NameContains=name, SortBy="CreationTime", SortOrder="Descending", MaxResults=100
    )
    for summary in page["TrainingJobSummaries"]:
        if stage_jobs.fullmatch(summary["TrainingJobName"]):
            tags = sagemaker.list_tags(ResourceArn=summary["TrainingJobArn"])["Tags"]
            if {"Key": RUN_TAG, "Value": config.name} in tags:
                return sagemaker.describe_training_job(TrainingJobName=summary["TrainingJobName"])
    return None


def _data_uri(job: DescribeTrainingJobResponseTypeDef) -> str | None:
    for channel in job.get("InputDataConfig", []):
        if channel["ChannelName"] == "train":
            # None of a job that mounts a file system.
            return channel["DataSource"].get("S3DataSource", {}).get("S3Uri")
    return None
