"""What lies where a stage's checkpoints go: the job resumes the newest that it finds there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm_train.estimators.config.naming import checkpoint_uri, staging_bucket
from sm_train.estimators.config.schema import RunConfig, StageSection
from sm_train.estimators.request.training import RUN_TAG
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.costing.memory_fit import plan_of
from sm_train.toolkit.jobs.checkpoints import MARKER

_LOOKED_AT = 5

_OTHER_RUN_FIX = (
    "Give the run another `name`: its checkpoints then have a prefix of their own. Or move what "
    "is there away."
)

CHECKPOINTS_OTHER_MODEL = Check(
    "checkpoints-other-model",
    ("error",),
    means="The newest checkpoint below the stage's prefix has another size than this run's model: "
    "for each parameter 4 bytes of weights, 8 of AdamW's state and 4 of the average. It is another "
    "run's.",
    impact="The job would resume it, finds that its weights are of another architecture, and stops "
    "at its start.",
    fix=_OTHER_RUN_FIX,
)
CHECKPOINTS_OTHER_RUN = Check(
    "checkpoints-other-run",
    ("warning",),
    means="There are checkpoints below the stage's prefix, and no job of this account and region "
    "is tagged with the run (`sm-train:run`); or the newest that is was trained on other data.",
    impact="The job goes on from what another run has learned, without a word.",
    fix=_OTHER_RUN_FIX + " Go on where the checkpoints were copied here on purpose.",
)
CHECKPOINTS_BEYOND = Check(
    "checkpoints-beyond",
    ("warning",),
    means="The newest checkpoint is of a step at or behind the stage's last.",
    impact="The job would be billed for its start and train nothing.",
    fix="Go on with the next stage, raise `max_steps`, or give the run another `name`.",
)
CHECKPOINTS_RESUMED = Check(
    "checkpoints-resumed",
    ("info",),
    means="There are checkpoints below the stage's prefix, and they seem to be this run's own.",
    impact="Less than the estimate says, which is for the stage from its first step.",
    fix="None is needed. To begin anew, give the run another `name`.",
)


@dataclass(frozen=True)
class Marker:
    """What a complete checkpoint says of itself; ``bytes`` are those of its tensors."""

    step: int
    bytes: int


def checkpoint_findings(config: RunConfig, session: Any, region: str) -> Iterator[Finding]:
    """For each stage, what its job would go on from.

    Raises:
        ClientError: S3 or SageMaker refuses to say.
    """
    bucket = staging_bucket(config, region)
    for index, stage in enumerate(config.stages):
        uri = checkpoint_uri(config, stage, bucket)
        marker = newest_marker(session.client("s3"), uri)
        if marker is not None:
            where = f"stages[{index}]"
            job = _newest_job(session.client("sagemaker"), config, stage)
            yield from _of_marker(config, stage, marker, job, where, uri)


def _of_marker(
    config: RunConfig,
    stage: StageSection,
    marker: Marker,
    job: dict[str, Any] | None,
    where: str,
    uri: str,
) -> Iterator[Finding]:
    expected = _expected_bytes(config, stage)
    there = f"{uri} has a checkpoint of step {marker.step:,}"
    if expected is not None and not 1 / _NEAR < marker.bytes / expected < _NEAR:
        yield CHECKPOINTS_OTHER_MODEL.found(
            "error",
            where,
            f"{there} with {marker.bytes / 1e9:.3g} GB, and {config.model.preset}'s have "
            f"{expected / 1e9:.3g}: it is of another model",
            "give the run another name",
        )
        return
    if marker.step >= stage.max_steps:
        yield CHECKPOINTS_BEYOND.found(
            "warning",
            where,
            f"{there}, and {stage.name} ends at {stage.max_steps:,}",
            "start the next stage, raise iterations, or give the run another name",
        )
    data = _data_of(job) if job else None
    if job is None:
        reason = f"no job here is tagged with run {config.name}"
    elif data != config.data.uri:
        reason = f"its job {job['TrainingJobName']} read {data}"
    else:
        yield CHECKPOINTS_RESUMED.found(
            "info",
            where,
            f"{there} of {stage.max_steps:,}: the job goes on from there",
            "give the run another name to begin anew",
        )
        return
    yield CHECKPOINTS_OTHER_RUN.found(
        "warning",
        where,
        f"{there}, and {reason}: it seems to be another run's",
        "give the run another name, unless it is meant",
    )


_NEAR = 1.38
"""With and without the average a model's checkpoints differ by 16 ÷ 12."""


def _expected_bytes(config: RunConfig, stage: StageSection) -> int | None:
    plan = plan_of(config, stage.resolution)
    each = 16 if config.training.ema_decay else 12
    return None if plan is None else plan.parameters * each


def newest_marker(s3: Any, uri: str) -> Marker | None:
    """Of the newest complete checkpoint below ``uri``; the newest few are looked at.

    Raises:
        ClientError: S3 refuses to say.
    """
    bucket, prefix = split_uri(uri)
    answer = s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/step-", Delimiter="/")
    folders = sorted((one["Prefix"] for one in answer.get("CommonPrefixes", [])), reverse=True)
    for folder in folders[:_LOOKED_AT]:
        marker = _read_marker(s3, bucket, f"{folder}{MARKER}")
        if marker is not None:
            return marker
    return None


def _read_marker(s3: Any, bucket: str, key: str) -> Marker | None:
    from botocore.exceptions import ClientError

    try:
        document = json.loads(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        files = document["files"]
        tensors = [one["bytes"] for one in files if one["name"].endswith(".safetensors")]
        return Marker(document["step"], sum(tensors))
    except ClientError as error:
        if error.response["Error"].get("Code") not in ("404", "NoSuchKey"):
            raise
    except (ValueError, KeyError, TypeError):
        pass  # damaged: the job passes it over, too
    return None


def _newest_job(sagemaker: Any, config: RunConfig, stage: StageSection) -> dict[str, Any] | None:
    """The newest of the stage's jobs that is tagged with the run."""
    name = f"{config.name}--{stage.name}-"
    ours = re.compile(rf"{re.escape(name)}\d{{4,}}")
    page = sagemaker.list_training_jobs(
        NameContains=name, SortBy="CreationTime", SortOrder="Descending", MaxResults=100
    )
    for summary in page["TrainingJobSummaries"]:
        if ours.fullmatch(summary["TrainingJobName"]):
            tags = sagemaker.list_tags(ResourceArn=summary["TrainingJobArn"])["Tags"]
            if {"Key": RUN_TAG, "Value": config.name} in tags:
                job: dict[str, Any] = sagemaker.describe_training_job(
                    TrainingJobName=summary["TrainingJobName"]
                )
                return job
    return None


def _data_of(job: dict[str, Any]) -> str | None:
    for channel in job.get("InputDataConfig", []):
        if channel["ChannelName"] == "train":
            uri: str = channel["DataSource"]["S3DataSource"]["S3Uri"]
            return uri
    return None
