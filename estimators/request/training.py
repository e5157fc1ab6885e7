"""A run file → the CreateTrainingJob request of each stage, as boto3 takes it: a pure function.

What the SDK sends is held against this on the wire (tests, and at every submission).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from sm_train.entrypoints.common.checkpoint_layout import FINAL_MODEL, step_folder_name
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.naming import (
    ROLE_NOT_SET,
    checkpoint_uri,
    job_name,
    staging_bucket,
    staging_uri,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.launcher import LaunchPlan
from sm_train.estimators.request.metrics import metric_definitions

TrainingRequest = dict[str, Any]
"""The keyword arguments of boto3's ``create_training_job``."""

CHECKPOINT_PATH = "/opt/ml/checkpoints"

RUN_TAG, STAGE_TAG = "sm-train:run", "sm-train:stage"
BUNDLE_TAG, COMMIT_TAG = "sm-train:bundle", "sm-train:commit"
"""A job's tags by which any laptop knows what it belongs to."""

REGIONS_TAG = "sm-train:regions"
"""A job's tag: the regions that may hold jobs of the run, its home region first. Runs of a single
region have none."""


# The SDK's start script, staged in the channel sm_drivers (sagemaker 3.27, training.constants).
_CHANNELS = "/opt/ml/input/data"
_START = f"{_CHANNELS}/sm_drivers/sm_train.sh"


class SourceBundle(Protocol):
    """What a request contains of its bundle: the archive's digest and the script to start."""

    @property
    def sha256(self) -> str: ...

    @property
    def entry(self) -> str: ...


def training_requests(
    config: RunConfig,
    launches: Mapping[str, LaunchPlan],
    bundle: SourceBundle,
    *,
    region: str,
    now: datetime,
    commit: str | None = None,
) -> list[TrainingRequest]:
    """Return the request of the first job of each stage named in ``launches``; the folder of its
    code is named after ``now``.

    ``commit`` is that of the run file's repository.
    """
    return [
        training_request(
            config,
            stage,
            launches[stage.name],
            bundle,
            region=region,
            staged=staging_uri(config, stage, region, now),
            commit=commit,
        )
        for stage in config.stages
        if stage.name in launches
    ]


def training_request(
    config: RunConfig,
    stage: StageSection,
    launch: LaunchPlan,
    bundle: SourceBundle,
    *,
    region: str,
    staged: str,
    commit: str | None = None,
) -> TrainingRequest:
    """Return the request of a stage's first job, whose code is in the folder ``staged``."""
    bucket = staging_bucket(config, region)
    return {
        "TrainingJobName": job_name(config.name, stage.name, 1),
        "AlgorithmSpecification": _algorithm(launch),
        "RoleArn": config.role or ROLE_NOT_SET,
        "HyperParameters": _hyperparameters(config, stage, launch, bundle, staged, region),
        "InputDataConfig": _channels(config, stage, launch, staged, bucket),
        "OutputDataConfig": _output(config, bucket),
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
            # A stall's evidence: the last collectives, dumped at a word from outside. These names
            # PyTorch 2.3 knows and later versions still do (ProcessGroupNCCL.hpp).
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/sm-train-nccl-",
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/sm-train-nccl-",
            **config.cluster.environment,
        },
        "Tags": _tags(config, stage, bundle, region, commit),
        **_asked_for(config.cluster),
    }


def _asked_for(cluster: ClusterSection) -> dict[str, Any]:
    """The fields that a request has only where the run file asks for them."""
    fields: dict[str, Any] = {}
    if cluster.retries:
        fields["RetryStrategy"] = {"MaximumRetryAttempts": cluster.retries}
    if cluster.vpc:
        fields["VpcConfig"] = {
            "SecurityGroupIds": cluster.vpc.security_groups,
            "Subnets": cluster.vpc.subnets,
        }
    if cluster.capacity == "spot":
        fields["EnableManagedSpotTraining"] = True
    if cluster.network_isolation:
        fields["EnableNetworkIsolation"] = True
    if cluster.encrypt_traffic:
        fields["EnableInterContainerTrafficEncryption"] = True
    if cluster.remote_debug:
        fields["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    if cluster.infra_check:
        fields["InfraCheckConfig"] = {"EnableInfraCheck": True}
    return fields


def _algorithm(launch: LaunchPlan) -> dict[str, Any]:
    algorithm: dict[str, Any] = {
        "TrainingImage": launch.image,
        "TrainingInputMode": "FastFile",
        "MetricDefinitions": metric_definitions(),
    }
    if launch.route == "torchrun":
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
    config: RunConfig,
    stage: StageSection,
    launch: LaunchPlan,
    bundle: SourceBundle,
    staged: str,
    region: str,
) -> dict[str, str]:
    """``--stage NAME`` for the script and, for smddp, what the container's toolkit reads."""
    parameters = {"stage": stage.name}
    if launch.route == "smddp":
        archive = f"{staged}/code/{ARCHIVE_NAME}"
        if config.cluster.network_isolation:
            # The toolkit could not fetch it; SageMaker itself lays a channel there.
            archive = f"{_CHANNELS}/code/{ARCHIVE_NAME}"
        parameters |= {
            "sagemaker_program": bundle.entry,
            "sagemaker_submit_directory": archive,
            "sagemaker_region": region,
            "sagemaker_container_log_level": "20",
            "sagemaker_instance_type": config.cluster.instance_type,
            "sagemaker_distributed_dataparallel_enabled": "true",
            "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        }
    return parameters


def _channels(
    config: RunConfig, stage: StageSection, launch: LaunchPlan, staged: str, bucket: str
) -> list[dict[str, Any]]:
    channels = [_channel("train", config.data.uri, "FastFile", sharded=True)]
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
            last = f"{checkpoints}/{step_folder_name(previous.max_steps)}/"
            channels.append(_channel("previous_state", last, "File"))
    for name, own in config.channels.items():
        channels.append(_channel(name, own.uri, own.mode, sharded=own.sharded))
    if launch.route == "torchrun" or config.cluster.network_isolation:
        channels.append(_channel("code", f"{staged}/code/{ARCHIVE_NAME}", "File"))
    if launch.route == "torchrun":
        channels.append(_channel("sm_drivers", f"{staged}/sm_drivers", "File"))
    return channels


def code_uri(request: TrainingRequest) -> str | None:
    """The archive of a request, or of a described job; None for another's job."""
    for channel in request.get("InputDataConfig", []):
        if channel["ChannelName"] == "code":
            uri: str = channel["DataSource"]["S3DataSource"]["S3Uri"]
            return uri
    directory: str | None = request.get("HyperParameters", {}).get("sagemaker_submit_directory")
    return directory


def staged_uri(request: TrainingRequest) -> str:
    """The folder of a request's code (:func:`staging_uri`)."""
    return (code_uri(request) or "").removesuffix(f"/code/{ARCHIVE_NAME}")


def previous_stage(config: RunConfig, stage: StageSection) -> StageSection | None:
    """The stage whose final model ``stage`` starts from."""
    index = config.stages.index(stage)
    return config.stages[index - 1] if index else None


def needs_state(stage: StageSection) -> bool:
    """Whether ``stage`` takes more from the one before than its final model."""
    return stage.init_from == "raw" or stage.optimizer_state == "keep"


def _channel(name: str, uri: str, mode: str, *, sharded: bool = False) -> dict[str, Any]:
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": uri,
                "S3DataDistributionType": "ShardedByS3Key" if sharded else "FullyReplicated",
            }
        },
        "InputMode": mode,
    }


def _output(config: RunConfig, bucket: str) -> dict[str, Any]:
    output = {
        "S3OutputPath": f"s3://{bucket}/{config.name}/output",
        "CompressionType": "GZIP",
    }
    if config.output_kms_key is not None:
        output["KmsKeyId"] = config.output_kms_key
    return output


def _resources(config: RunConfig, stage: StageSection) -> dict[str, Any]:
    cluster = config.cluster
    resources = _machines(cluster, stage.instances)
    resources["VolumeSizeInGB"] = cluster.volume_gb
    if cluster.volume_kms_key is not None:
        resources["VolumeKmsKeyId"] = cluster.volume_kms_key
    if cluster.capacity == "warm-pool":
        resources["KeepAlivePeriodInSeconds"] = cluster.keep_alive_period
    if cluster.capacity == "training-plan":
        resources["TrainingPlanArn"] = cluster.training_plan
    return resources


def _machines(cluster: ClusterSection, instances: int) -> dict[str, Any]:
    """One type, or several in order of preference; a count is for all of them or beside each."""
    if not cluster.alternatives:
        return {"InstanceType": cluster.instance_type, "InstanceCount": instances}
    counts = {
        name: cluster.equivalent_instances(name, instances) for name in cluster.instance_types
    }
    if set(counts.values()) == {instances}:
        return {
            "InstancePreferences": [{"InstanceType": name} for name in counts],
            "InstanceCount": instances,
        }
    return {
        "InstancePreferences": [
            {"InstanceType": name, "InstanceCount": count} for name, count in counts.items()
        ]
    }


def _stopping(config: RunConfig) -> dict[str, int]:
    cluster = config.cluster
    stopping = {"MaxRuntimeInSeconds": cluster.max_runtime}
    if cluster.capacity == "spot":
        stopping["MaxWaitTimeInSeconds"] = cluster.max_wait or cluster.max_runtime
    if cluster.max_pending is not None:
        stopping["MaxPendingTimeInSeconds"] = cluster.max_pending
    return stopping


def _tags(
    config: RunConfig, stage: StageSection, bundle: SourceBundle, region: str, commit: str | None
) -> list[dict[str, str]]:
    regions = config.recovery.regions(region)
    tags = {
        **config.tags,
        RUN_TAG: config.name,
        STAGE_TAG: stage.name,
        BUNDLE_TAG: bundle.sha256,
    }
    if commit is not None:
        tags[COMMIT_TAG] = commit
    if len(regions) > 1:
        tags[REGIONS_TAG] = " ".join(regions)
    return [{"Key": key, "Value": value} for key, value in tags.items()]
