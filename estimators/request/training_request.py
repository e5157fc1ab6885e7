"""Turn a run file into the CreateTrainingJob request of each stage, as boto3 takes it.

These are pure functions. What the SDK sends is compared with the request on the wire, in tests and
at every submission.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from sm_train.entrypoints.base.pip_install import CODEARTIFACT, PIP_INDEX
from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL, step_folder_name
from sm_train.entrypoints.job_interface.index_location import index_channel, removal_variables
from sm_train.entrypoints.job_interface.job_config import BUNDLE_VARIABLE, COMMIT_VARIABLE
from sm_train.entrypoints.storage.bucket_settings import (
    ACCOUNT_VARIABLE,
    bucket_key,
    bucket_variables,
)
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.data import FileSystemInputSection
from sm_train.estimators.config.naming import (
    ROLE_NOT_SET,
    checkpoint_uri,
    job_name,
    staging_bucket,
    staging_uri,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.entrypoint import CHANNELS, ENTRYPOINT, container_arguments
from sm_train.estimators.request.images import in_ecr
from sm_train.estimators.request.launch_plan import LaunchPlan
from sm_train.estimators.request.metric_definitions import metric_definitions
from sm_train.estimators.request.request_patch import additions, with_additions

if TYPE_CHECKING:
    from types_boto3_sagemaker.literals import TrainingInstanceTypeType
    from types_boto3_sagemaker.type_defs import (
        AlgorithmSpecificationTypeDef,
        ChannelTypeDef,
        CreateTrainingJobRequestTypeDef,
        InstancePreferenceTypeDef,
        OutputDataConfigTypeDef,
        ResourceConfigTypeDef,
        StoppingConditionTypeDef,
        TagTypeDef,
    )

    TrainingRequest: TypeAlias = CreateTrainingJobRequestTypeDef
    """The keyword arguments of boto3's ``create_training_job``."""
else:
    TrainingRequest = dict

CHECKPOINT_PATH = "/opt/ml/checkpoints"

RUN_TAG, STAGE_TAG = "sm-train:run", "sm-train:stage"
BUNDLE_TAG, COMMIT_TAG = "sm-train:bundle", "sm-train:commit"
"""Tags of a job, by which it is found from any machine."""

REGIONS_TAG = "sm-train:regions"
"""A job's tag: the regions that may hold jobs of the run, its home region first. Runs of a single
region have none."""

BUCKET_OWNER_TAG = "sm-train:bucket-owner"
"""A job's tag: the account that owns the bucket of its checkpoints, if the run file names it."""


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
    """Return the request of the first job of each stage named in ``launches``.

    The folder of its staged code is named after ``now``. ``commit`` is that of the run file's
    repository.
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
    """Return the request of a stage's first job, whose code is in the folder ``staged``.

    Raises:
        RequestPatchError: ``cluster.request_patch`` changes what another key sets.
    """
    bucket = staging_bucket(config, region)
    request: TrainingRequest = {
        "TrainingJobName": job_name(config.name, stage.name, 1),
        "AlgorithmSpecification": _algorithm(config.cluster, launch),
        "RoleArn": config.role or ROLE_NOT_SET,
        "HyperParameters": _hyperparameters(config, stage, launch, bundle, staged, region),
        "InputDataConfig": input_channels(config, stage, launch, staged, bucket),
        "OutputDataConfig": _output(config, bucket),
        "CheckpointConfig": {
            # With the slash: SageMaker restores every key that starts with this string, so 64px
            # would also restore 64px-long (syne-tune/syne-tune pull request 363, 2022-09-28).
            "S3Uri": f"{checkpoint_uri(config, stage, bucket)}/",
            "LocalPath": CHECKPOINT_PATH,
        },
        "ResourceConfig": _resources(config, stage),
        "ProfilerConfig": {"DisableProfiler": True},
        "StoppingCondition": _stopping_condition(config),
        "Environment": {
            # A job in a VPC may not reach STS, which would tell its account.
            ACCOUNT_VARIABLE: (config.role or ROLE_NOT_SET).split(":")[4],
            **bucket_variables(config.bucket_owners, {}),
            **job_environment(config, bundle, commit),
        },
        "Tags": _tags(config, stage, bundle, region, commit),
    }
    _set_optional_fields(request, config.cluster)
    return with_additions(request, additions(config.cluster))


def job_environment(config: RunConfig, bundle: SourceBundle, commit: str | None) -> dict[str, str]:
    """Return the environment variables of every job of the run."""
    return {
        "NCCL_DEBUG": "INFO",  # logs the transport that NCCL actually selects
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "PYTHONUNBUFFERED": "1",
        # NCCL's flight recorder keeps the last collectives and dumps them when the watchdog
        # writes to the pipe. PyTorch 2.3 introduced these names, and later versions still
        # support them (ProcessGroupNCCL.hpp).
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/sm-train-nccl-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/sm-train-nccl-",
        # For the model card of the final model.
        BUNDLE_VARIABLE: bundle.sha256,
        **({COMMIT_VARIABLE: commit} if commit is not None else {}),
        **_removals(config),
        **package_index_variables(config.cluster),
        **config.cluster.environment,
    }


def _removals(config: RunConfig) -> dict[str, str]:
    """Return the variables that say where removed samples are listed.

    A job without network gets the lists that exist when it starts, with the indexes.
    """
    lists = {} if config.cluster.network_isolation else config.removal_lists
    return removal_variables(lists)


def package_index_variables(cluster: ClusterSection) -> dict[str, str]:
    """Return the variable by which pip in a job finds ``cluster.package_index``."""
    index = cluster.package_index
    if index is None:
        return {}
    return {CODEARTIFACT if index.startswith("arn:") else PIP_INDEX: index}


def _set_optional_fields(request: TrainingRequest, cluster: ClusterSection) -> None:
    """Set the fields that a request has only if the run file enables them."""
    if cluster.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": cluster.retries}
    if cluster.vpc:
        request["VpcConfig"] = {
            "SecurityGroupIds": cluster.vpc.security_groups,
            "Subnets": cluster.vpc.subnets,
        }
    if cluster.capacity == "spot":
        request["EnableManagedSpotTraining"] = True
    if cluster.network_isolation:
        request["EnableNetworkIsolation"] = True
    if cluster.encrypt_traffic:
        request["EnableInterContainerTrafficEncryption"] = True
    if cluster.remote_debug:
        request["RemoteDebugConfig"] = {"EnableRemoteDebug": True}


def _algorithm(cluster: ClusterSection, launch: LaunchPlan) -> AlgorithmSpecificationTypeDef:
    algorithm: AlgorithmSpecificationTypeDef = {
        "TrainingImage": launch.image,
        "TrainingInputMode": "FastFile",
        "MetricDefinitions": metric_definitions(),
        "ContainerEntrypoint": ENTRYPOINT,
        "ContainerArguments": container_arguments(launch.route),
    }
    if not in_ecr(launch.image):
        algorithm["TrainingImageConfig"] = {"TrainingRepositoryAccessMode": "Vpc"}
        if cluster.image_credentials is not None:
            algorithm["TrainingImageConfig"]["TrainingRepositoryAuthConfig"] = {
                "TrainingRepositoryCredentialsProviderArn": cluster.image_credentials
            }
    return algorithm


def _hyperparameters(
    config: RunConfig,
    stage: StageSection,
    launch: LaunchPlan,
    bundle: SourceBundle,
    staged: str,
    region: str,
) -> dict[str, str]:
    """Return ``--stage NAME`` for the script and, for smddp, the settings of AWS's toolkit.

    The toolkit parses each value as JSON, so that a bare ``1e3`` would become ``--stage 1000.0``
    (sagemaker-training 5.1.4, mapping and params). Our launcher takes the values as they are.
    """
    if launch.route == "torchrun":
        return {"stage": stage.name}
    archive = f"{staged}/code/{ARCHIVE_NAME}"
    if config.cluster.network_isolation:
        # The toolkit has no network to download it; SageMaker mounts it as a channel.
        archive = f"{CHANNELS}/code/{ARCHIVE_NAME}"
    parameters: dict[str, object] = {
        "stage": stage.name,
        "sagemaker_program": bundle.entry,
        "sagemaker_submit_directory": archive,
        "sagemaker_region": region,
        "sagemaker_container_log_level": 20,
        "sagemaker_instance_type": config.cluster.instance_type,
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
    }
    return {name: json.dumps(value) for name, value in parameters.items()}


def hyperparameter(request: Mapping[str, Any], name: str) -> str | None:
    """Return a hyperparameter of a request or of a described job, whichever its route."""
    value: str | None = request.get("HyperParameters", {}).get(name)
    if value is None or not value.startswith('"'):
        return value
    decoded: str = json.loads(value)
    return decoded


def stage_name(request: Mapping[str, Any]) -> str:
    """Return the stage that a request of ours trains."""
    name = hyperparameter(request, "stage")
    assert name is not None
    return name


def input_channels(
    config: RunConfig, stage: StageSection, launch: LaunchPlan, staged: str, bucket: str
) -> list[ChannelTypeDef]:
    """Return the channels of a job: its data, what it starts from, and its code."""
    channels: list[ChannelTypeDef] = []
    if not config.data.synthetic_samples:
        sharded = config.train_sharded
        channels.append(
            _mounted("train", config.data.file_system)
            if config.data.file_system is not None
            else _channel("train", config.data.uri, "FastFile", sharded=sharded)
        )
    if config.index_uri:
        # AWS documents FastFile for prefixes only, and this is a single object.
        channels.append(_channel("index", config.index_uri, "File"))
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
    for name, channel in config.channels.items():
        if channel.file_system is not None:
            channels.append(_mounted(name, channel.file_system))
        elif channel.uri is not None:
            channels.append(_channel(name, channel.uri, channel.mode, sharded=channel.sharded))
    for name, uri in config.source_indexes.items():
        channels.append(_channel(index_channel(name), uri, "File"))
    if launch.route == "torchrun" or config.cluster.network_isolation:
        channels.append(_channel("code", f"{staged}/code/{ARCHIVE_NAME}", "File"))
    if launch.route == "torchrun":
        channels.append(_channel("sm_drivers", f"{staged}/sm_drivers/", "File"))
    return channels


def code_uri(request: Mapping[str, Any]) -> str | None:
    """Return the archive of a request or of a described job; None for a job of other software."""
    for channel in request.get("InputDataConfig", []):
        if channel["ChannelName"] == "code":
            uri: str = channel["DataSource"]["S3DataSource"]["S3Uri"]
            return uri
    return hyperparameter(request, "sagemaker_submit_directory")


def staged_uri(request: Mapping[str, Any]) -> str:
    """Return the folder of a request's code (:func:`staging_uri`)."""
    return (code_uri(request) or "").removesuffix(f"/code/{ARCHIVE_NAME}")


def previous_stage(config: RunConfig, stage: StageSection) -> StageSection | None:
    """Return the stage whose final model ``stage`` starts from."""
    index = config.stages.index(stage)
    return config.stages[index - 1] if index else None


def needs_state(stage: StageSection) -> bool:
    """Return whether ``stage`` needs the previous one's last checkpoint, not only its model."""
    return stage.init_from == "raw" or stage.optimizer_state == "keep"


def _channel(
    name: str, uri: str, mode: Literal["File", "FastFile"], *, sharded: bool = False
) -> ChannelTypeDef:
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


def _mounted(name: str, file_system: FileSystemInputSection) -> ChannelTypeDef:
    return {
        "ChannelName": name,
        "DataSource": {
            "FileSystemDataSource": {
                "FileSystemId": file_system.id,
                "FileSystemAccessMode": "ro",
                "FileSystemType": file_system.type,
                "DirectoryPath": file_system.directory,
            }
        },
        "InputMode": "File",
    }


def _output(config: RunConfig, bucket: str) -> OutputDataConfigTypeDef:
    output: OutputDataConfigTypeDef = {
        "S3OutputPath": f"s3://{bucket}/{config.name}/output",
        "CompressionType": "NONE",  # packing tens of gigabytes would be billed
    }
    key = bucket_key(config.bucket_keys, bucket)
    if key is not None:
        output["KmsKeyId"] = key
    return output


def _resources(config: RunConfig, stage: StageSection) -> ResourceConfigTypeDef:
    cluster = config.cluster
    resources = _instances(cluster, stage.instances)
    resources["VolumeSizeInGB"] = cluster.volume_gb
    if cluster.volume_kms_key is not None:
        resources["VolumeKmsKeyId"] = cluster.volume_kms_key
    if cluster.keep_alive_period is not None:
        resources["KeepAlivePeriodInSeconds"] = cluster.keep_alive_period
    if cluster.training_plan is not None and not cluster.alternatives:
        resources["TrainingPlanArn"] = cluster.training_plan
    return resources


def _instances(cluster: ClusterSection, instances: int) -> ResourceConfigTypeDef:
    """Return one instance type, or several in order of preference.

    The service takes either one count for all types or one for each.
    """
    if not cluster.alternatives:
        return {
            "InstanceType": _instance_type(cluster.instance_type),
            "InstanceCount": instances,
        }
    counts = {
        name: cluster.equivalent_instances(name, instances) for name in cluster.instance_types
    }
    preferences: list[InstancePreferenceTypeDef] = [
        {"InstanceType": _instance_type(name)} for name in counts
    ]
    if cluster.training_plan is not None:
        # The others, which have no plan, are on-demand instances.
        preferences[0]["TrainingPlanArns"] = [cluster.training_plan]
    if set(counts.values()) == {instances}:
        return {"InstancePreferences": preferences, "InstanceCount": instances}
    for preference, count in zip(preferences, counts.values(), strict=True):
        preference["InstanceCount"] = count
    return {"InstancePreferences": preferences}


def _instance_type(name: str) -> TrainingInstanceTypeType:
    return cast("TrainingInstanceTypeType", name)


def _stopping_condition(config: RunConfig) -> StoppingConditionTypeDef:
    cluster = config.cluster
    condition: StoppingConditionTypeDef = {"MaxRuntimeInSeconds": cluster.max_runtime}
    if cluster.capacity == "spot":
        condition["MaxWaitTimeInSeconds"] = cluster.max_wait or cluster.max_runtime
    if cluster.max_pending is not None:
        condition["MaxPendingTimeInSeconds"] = cluster.max_pending
    return condition


def _tags(
    config: RunConfig, stage: StageSection, bundle: SourceBundle, region: str, commit: str | None
) -> list[TagTypeDef]:
    regions = config.recovery.regions(region)
    tags = {
        **config.tags,
        RUN_TAG: config.name,
        STAGE_TAG: stage.name,
        BUNDLE_TAG: bundle.sha256,
    }
    if commit is not None:
        tags[COMMIT_TAG] = commit
    if owner := config.bucket_owners.get(staging_bucket(config, region)):
        tags[BUCKET_OWNER_TAG] = owner
    if len(regions) > 1:
        tags[REGIONS_TAG] = " ".join(regions)
    return [{"Key": key, "Value": value} for key, value in tags.items()]
