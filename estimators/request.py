"""A run file → the CreateTrainingJob request of each stage, as boto3 takes it: a pure function.

What the SDK sends is held against this on the wire (tests, and at every submission).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sm_train.estimators.bundle import ARCHIVE_NAME, ENTRY_SCRIPT, Bundle
from sm_train.estimators.launch import Launch, framework_version, launch
from sm_train.estimators.metrics import metric_definitions
from sm_train.estimators.run_config import RunConfig, Stage

TrainingRequest = dict[str, Any]
"""The keyword arguments of boto3's ``create_training_job``."""

CHECKPOINT_PATH = "/opt/ml/checkpoints"
FINAL_MODEL = "final"
"""Folder below the checkpoints in which a stage leaves the model that the next one starts from."""

RUN_TAG, STAGE_TAG = "sm-train:run", "sm-train:stage"
"""A job's tags by which any laptop knows what it belongs to."""

ROLE_NOT_SET = "arn:aws:iam::000000000000:role/ROLE-NOT-SET"
"""Stands in a dry run for a role that the run file does not name; never submitted."""

# The SDK's start script, staged in the channel sm_drivers (sagemaker 3.27, training.constants).
_START = "/opt/ml/input/data/sm_drivers/sm_train.sh"


def image_uri(config: RunConfig, region: str) -> str:
    """The container image: the run file's own, or AWS's PyTorch image from the SDK's table.

    Raises:
        ValueError: AWS has no such image in the region.
    """
    version = framework_version(config)
    if version is None:
        assert config.cluster.image is not None
        return config.cluster.image
    from sagemaker.core import image_uris

    uri: str = image_uris.retrieve(
        "pytorch",
        region=region,
        version=version,
        instance_type=config.cluster.instance_type,
        image_scope="training",
    )
    return uri


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


def training_request(
    config: RunConfig,
    stage: Stage,
    bundle: Bundle,
    *,
    region: str,
    image: str,
    staged: str,
    attempt: int = 1,
) -> TrainingRequest:
    """The request of one stage's job, whose code is in the folder ``staged`` (:func:`code_uri`)."""
    start = launch(config, stage)
    bucket = staging_bucket(config, region)
    request: TrainingRequest = {
        "TrainingJobName": job_name(config.name, stage.name, attempt),
        "AlgorithmSpecification": _algorithm(start, image),
        "RoleArn": config.role or ROLE_NOT_SET,
        "HyperParameters": _hyperparameters(config, stage, start, staged, region),
        "InputDataConfig": _channels(config, stage, start, staged, bucket),
        "OutputDataConfig": {
            "S3OutputPath": f"s3://{bucket}/{config.name}/output",
            "CompressionType": "GZIP",
        },
        "CheckpointConfig": {
            "S3Uri": checkpoint_uri(config, stage, bucket),
            "LocalPath": CHECKPOINT_PATH,
        },
        "ResourceConfig": _resources(config, stage),
        "StoppingCondition": _stopping(config),
        "Environment": {
            "NCCL_DEBUG": "INFO",  # the transport that NCCL really chose shows in the log
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "PYTHONUNBUFFERED": "1",
            # torchrun kills 30 s after SIGTERM otherwise; SageMaker grants a job 120 (its developer
            # guide, StopTrainingJob).
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",
            **config.cluster.environment,
        },
        "Tags": _tags(config, stage, bundle),
    }
    if config.cluster.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": config.cluster.retries}
    if config.cluster.vpc:
        request["VpcConfig"] = {
            "SecurityGroupIds": config.cluster.vpc.security_groups,
            "Subnets": config.cluster.vpc.subnets,
        }
    if config.cluster.capacity == "spot":
        request["EnableManagedSpotTraining"] = True
    return request


def code_prefix(run: str) -> str:
    """Below it in the bucket, each submission keeps its code in a folder of its own."""
    return f"{run}/code"


def code_uri(config: RunConfig, stage: Stage, region: str, now: datetime) -> str:
    """Where a submission of ``stage`` keeps its code; as the SDK names it, to the second."""
    bucket = staging_bucket(config, region)
    return f"s3://{bucket}/{code_prefix(config.name)}/{stage.name}-{now:%Y%m%d%H%M%S}/input"


def staged_uri(request: TrainingRequest) -> str:
    """The folder of a request's code (:func:`code_uri`)."""
    archive = request["HyperParameters"].get("sagemaker_submit_directory")
    if archive is None:
        [archive] = [
            channel["DataSource"]["S3DataSource"]["S3Uri"]
            for channel in request["InputDataConfig"]
            if channel["ChannelName"] == "code"
        ]
    folder: str = archive.removesuffix(f"/code/{ARCHIVE_NAME}")
    return folder


def checkpoint_uri(config: RunConfig, stage: Stage, bucket: str) -> str:
    """Where a stage's checkpoints go: known before any job, the same for every restart."""
    return f"s3://{bucket}/{config.name}/checkpoints/{stage.name}"


def _algorithm(start: Launch, image: str) -> dict[str, Any]:
    algorithm: dict[str, Any] = {
        "TrainingImage": image,
        "TrainingInputMode": "FastFile",
        "MetricDefinitions": metric_definitions(),
    }
    if start.route == "torchrun":
        algorithm["ContainerEntrypoint"] = ["/bin/bash"]
        algorithm["ContainerArguments"] = start_arguments(replaced=True)
    return algorithm


def start_arguments(*, replaced: bool) -> list[str]:
    """What the shell is told: to run the start script, or (``replaced``) to become it.

    The SDK writes the former (sagemaker 3.27). The shells of some images, before 5.1, then stay the
    container's first process, which alone gets SageMaker's SIGTERM and would ignore it.
    """
    return ["-c", f"chmod +x {_START} && {'exec ' if replaced else ''}{_START}"]


def _hyperparameters(
    config: RunConfig, stage: Stage, start: Launch, staged: str, region: str
) -> dict[str, str]:
    """``--stage NAME`` for the script and, for smddp, what the container's toolkit reads."""
    parameters = {"stage": stage.name}
    if start.route == "smddp":
        parameters |= {
            "sagemaker_program": ENTRY_SCRIPT,
            "sagemaker_submit_directory": f"{staged}/code/{ARCHIVE_NAME}",
            "sagemaker_region": region,
            "sagemaker_container_log_level": "20",
            "sagemaker_instance_type": config.cluster.instance_type,
            "sagemaker_distributed_dataparallel_enabled": "true",
            "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        }
    return parameters


def _channels(
    config: RunConfig, stage: Stage, start: Launch, staged: str, bucket: str
) -> list[dict[str, Any]]:
    channels = [_channel("train", config.data.uri, "FastFile", "ShardedByS3Key")]
    if config.data.index_uri:
        # Only what is looked up in it is fetched.
        channels.append(_channel("index", config.data.index_uri, "FastFile"))
    if config.data.validation:
        channels.append(_channel("validation", config.data.validation, "FastFile"))
    if config.model.components:
        channels.append(_channel("model", config.model.components, "File"))
    if previous := previous_stage(config, stage):
        checkpoints = checkpoint_uri(config, previous, bucket)
        channels.append(_channel("previous", f"{checkpoints}/{FINAL_MODEL}/", "File"))
        if needs_state(stage):
            last = f"{checkpoints}/{last_checkpoint(previous)}/"
            channels.append(_channel("previous_state", last, "File"))
    if start.route == "torchrun":
        channels.append(_channel("code", f"{staged}/code/{ARCHIVE_NAME}", "File"))
        channels.append(_channel("sm_drivers", f"{staged}/sm_drivers", "File"))
    return channels


def previous_stage(config: RunConfig, stage: Stage) -> Stage | None:
    """The stage whose final model ``stage`` starts from."""
    index = config.stages.index(stage)
    return config.stages[index - 1] if index else None


def needs_state(stage: Stage) -> bool:
    """Whether ``stage`` takes more from the one before than its final model."""
    return stage.start == "raw" or stage.optimizer == "carried"


def last_checkpoint(stage: Stage) -> str:
    """The folder of the checkpoint with which a stage ends (entrypoints/checkpoint.py)."""
    return f"step-{stage.iterations:08d}"


def _channel(
    name: str, uri: str, mode: str, distribution: str = "FullyReplicated"
) -> dict[str, Any]:
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": uri,
                "S3DataDistributionType": distribution,
            }
        },
        "InputMode": mode,
    }


def _resources(config: RunConfig, stage: Stage) -> dict[str, Any]:
    cluster = config.cluster
    resources: dict[str, Any] = {
        "InstanceType": cluster.instance_type,
        "InstanceCount": stage.instances,
        "VolumeSizeInGB": cluster.volume_gb,
    }
    if cluster.capacity == "warm-pool":
        resources["KeepAlivePeriodInSeconds"] = cluster.keep_alive
    if cluster.capacity == "training-plan":
        resources["TrainingPlanArn"] = cluster.training_plan
    return resources


def _stopping(config: RunConfig) -> dict[str, int]:
    stopping = {"MaxRuntimeInSeconds": config.cluster.max_runtime}
    if config.cluster.capacity == "spot":
        stopping["MaxWaitTimeInSeconds"] = config.cluster.max_wait or config.cluster.max_runtime
    return stopping


def _tags(config: RunConfig, stage: Stage, bundle: Bundle) -> list[dict[str, str]]:
    tags = {
        **config.tags,
        RUN_TAG: config.name,
        STAGE_TAG: stage.name,
        "sm-train:bundle": bundle.sha256,
    }
    return [{"Key": key, "Value": value} for key, value in tags.items()]
