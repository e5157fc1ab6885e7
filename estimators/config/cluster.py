"""The run file's ``cluster``: instances, their capacity, network and isolation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from sm_train.cost.instances import (
    OWN_PATTERN,
    UnknownInstanceTypeError,
    instance_type,
    instance_types,
    is_own_machine,
)
from sm_train.entrypoints.job_interface.job_config import CollectiveBackend, major_minor
from sm_train.estimators.config.fields import (
    Duration,
    Image,
    KmsKey,
    LambdaArn,
    PackageIndex,
    Section,
    TrainingPlan,
    VariableName,
    VariableValue,
    Version,
    VpcId,
    reject_bool,
)

MAX_VARIABLES = 100
RESERVED_VARIABLES = 8
"""Number of variables that a request adds to the user's (request/training_request.py)."""

SMDDP_PYTORCH = "2.5.1"
"""PyTorch of the newest AWS image that includes SMDDP."""

SMDDP_VERSIONS = ((2, 3), (2, 4), (2, 5))
"""PyTorch versions whose AWS images include SMDDP: library 2.5.0 in 2.4.0 and 2.6.0 in 2.5.1; none
in 2.6.0 or later (aws/deep-learning-containers, branch master, pytorch/training/docker/*/py3/*/
Dockerfile.gpu; the change of 2.5 is #4619 of 2025-03-13)."""

MIN_PYTORCH = (2, 3)
"""Oldest PyTorch that the training code runs on (setup.cfg, `make test-torch-2.3`)."""

MAX_RUNTIME_SECONDS = 28 * 86400
"""Longest time a training job may run or wait (StoppingCondition in botocore's service model)."""

_MAX_VOLUME_GB = 16384


class VpcSection(Section):
    """The private network that the job's instances join."""

    subnets: Annotated[list[VpcId], Field(min_length=1, max_length=16)] = Field(
        description="IDs of the subnets."
    )
    security_groups: Annotated[list[VpcId], Field(min_length=1, max_length=5)] = Field(
        description="IDs of the security groups."
    )


KEYS_OF_FIELDS = {
    "TrainingJobName": "name",
    "RoleArn": "role",
    "AlgorithmSpecification.TrainingImage": "cluster.image",
    "HyperParameters": "entry_args",
    "InputDataConfig": "data and channels",
    "OutputDataConfig.S3OutputPath": "bucket",
    "OutputDataConfig.KmsKeyId": "output_kms_key",
    "CheckpointConfig": "checkpoint",
    "ResourceConfig.InstanceType": "cluster.instance_type",
    "ResourceConfig.InstanceCount": "stages",
    "ResourceConfig.InstancePreferences": "cluster.alternatives",
    "ResourceConfig.VolumeSizeInGB": "cluster.volume_gb",
    "ResourceConfig.VolumeKmsKeyId": "cluster.volume_kms_key",
    "ResourceConfig.KeepAlivePeriodInSeconds": "cluster.keep_alive_period",
    "ResourceConfig.TrainingPlanArn": "cluster.training_plan",
    "StoppingCondition": "cluster.max_runtime, max_wait and max_pending",
    "Environment": "cluster.environment",
    "Tags": "tags",
    "VpcConfig": "cluster.vpc",
    "RetryStrategy": "cluster.retries",
    "EnableManagedSpotTraining": "cluster.capacity",
    "EnableNetworkIsolation": "cluster.network_isolation",
    "EnableInterContainerTrafficEncryption": "cluster.encrypt_traffic",
    "RemoteDebugConfig": "cluster.remote_debug",
}
"""Field of CreateTrainingJob that ``request_patch`` may not have → the key that sets it."""


def _patched_fields(patch: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what a patch changes, with those of the objects above."""
    for name, value in patch.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _patched_fields(value))


class ClusterSection(Section):
    """The instances of a job, and how they are provisioned."""

    instance_type: str = Field(
        description="SageMaker instance type, such as ml.p4de.24xlarge; or, for `manifest`, a "
        "machine that AWS does not sell: own., the number and name of its GPUs, the Gbit/s between "
        "nodes and the price per hour, as in own.8xH100-SXM5-80GB.3200gbps.23.5usd.",
        json_schema_extra=lambda schema: schema.update(
            anyOf=[
                {"enum": [instance.name for instance in instance_types()]},
                {"pattern": OWN_PATTERN},
            ]
        ),
    )
    alternatives: Annotated[list[str], Field(max_length=4)] = Field(
        default_factory=list,
        description="Instance types that SageMaker may use instead, in this order, if "
        "instance_type has no capacity. Their number is chosen so that the number of GPUs stays "
        "the same. The displayed price is that of instance_type. With capacity: training-plan "
        "these are on-demand instances.",
    )
    capacity: Literal["on-demand", "spot", "warm-pool", "training-plan"] = Field(
        default="on-demand", description="How the instances are provisioned and billed."
    )
    keep_alive_period: Annotated[Duration, Field(ge=60, le=21600)] | None = Field(
        default=None,
        description="How long instances are kept (and billed) after a job. Requires capacity: "
        "warm-pool.",
    )
    training_plan: TrainingPlan | None = Field(
        default=None, description="ARN of the training plan. Requires capacity: training-plan."
    )
    request_patch: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields to add to CreateTrainingJob, by their names in the API, such as "
        "{SessionChainingConfig: {EnableSessionTagChaining: true}}. Fields that other keys set "
        "cannot be changed.",
    )
    max_wait: Annotated[Duration, Field(ge=1, le=2 * MAX_RUNTIME_SECONDS)] | None = Field(
        default=None,
        description="Maximum duration of waiting and running together. Requires capacity: spot.",
    )
    max_pending: Annotated[Duration, Field(ge=1800, le=MAX_RUNTIME_SECONDS)] | None = Field(
        default=None,
        description="Maximum time to wait for capacity, after which SageMaker stops the job.",
    )
    backend: CollectiveBackend = Field(
        default="auto",
        description="Library for gradient all-reduce. auto is nccl, on the newest supported image. "
        "smddp is AWS's, for several p4d or p4de instances, on an older image.",
    )
    image: Image | None = Field(
        default=None,
        description="Container image in ECR, or with `vpc` in a private registry that it reaches. "
        "None takes AWS's PyTorch image.",
    )
    image_credentials: LambdaArn | None = Field(
        default=None,
        description="ARN of the Lambda function that gives SageMaker the user name and password "
        "of the private registry of `image`. None logs in without.",
    )
    package_index: PackageIndex | None = Field(
        default=None,
        description="Where jobs install their packages from: the https:// address of an index "
        "that needs no password, or the ARN of a CodeArtifact repository. None is PyPI.",
    )
    framework_version: Version | None = Field(
        default=None,
        description="PyTorch version of AWS's image, or of your own image if `image` is set. None "
        "selects it by backend.",
    )
    retries: Annotated[int, BeforeValidator(reject_bool), Field(ge=0, le=30)] = Field(
        default=3,
        description="Number of times SageMaker restarts the job after an internal error.",
    )
    max_runtime: Annotated[Duration, Field(ge=1, le=MAX_RUNTIME_SECONDS)] = Field(
        default=5 * 86400,
        description="Maximum duration of the job, retries included. SageMaker stops it then.",
    )
    volume_gb: Annotated[int, BeforeValidator(reject_bool), Field(ge=1, le=_MAX_VOLUME_GB)] = Field(
        default=30,
        description="Size of the EBS volume of each instance. Instances with local NVMe have none.",
    )
    volume_kms_key: KmsKey | None = Field(
        default=None,
        description="KMS key that encrypts the EBS volume. Not allowed for types with local NVMe.",
    )
    vpc: VpcSection | None = Field(
        default=None, description="Private network of the job. None uses SageMaker's network."
    )
    network_isolation: bool = Field(
        default=False,
        description="Whether to block all network access of the container except to its peers. "
        "Nothing can then be installed at startup, so `image` must contain all packages.",
    )
    encrypt_traffic: bool = Field(
        default=False,
        description="Whether to encrypt the traffic between instances, which slows training.",
    )
    remote_debug: bool = Field(
        default=False, description="Whether to allow a shell in the running container through SSM."
    )
    environment: dict[VariableName, VariableValue] = Field(
        default_factory=dict,
        max_length=MAX_VARIABLES - RESERVED_VARIABLES,
        description="Environment variables of the job. Do not store secrets here: they are "
        "visible in the console.",
    )

    @property
    def is_own_machine(self) -> bool:
        """Return whether AWS does not sell the machine: the user describes it."""
        return is_own_machine(self.instance_type)

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Return every type that the job may run on, the preferred one first."""
        return (self.instance_type, *self.alternatives)

    def equivalent_instances(self, name: str, instances: int) -> int:
        """Return how many of type ``name`` have the GPUs of ``instances`` of the preferred type."""
        gpus = instances * instance_type(self.instance_type).accelerators
        return gpus // instance_type(name).accelerators

    def max_instances(self, instances: int) -> int:
        """Return the largest number of instances over all types: each needs its own shards."""
        return max(self.equivalent_instances(name, instances) for name in self.instance_types)

    @field_validator("request_patch")
    @classmethod
    def _changes_no_other_key(cls, patch: dict[str, Any]) -> dict[str, Any]:
        for field in _patched_fields(patch):
            if field in KEYS_OF_FIELDS:
                raise ValueError(f"{field} is set by {KEYS_OF_FIELDS[field]}; write that instead")
        return patch

    @model_validator(mode="after")
    def _check_consistency(self) -> ClusterSection:
        self._check_instance_types()
        self._check_backend()
        self._check_capacity()
        self._check_image()
        if self.framework_version and major_minor(self.framework_version) < MIN_PYTORCH:
            raise ValueError(
                f"framework_version: the training code needs PyTorch 2.3 or newer, and "
                f"{self.framework_version} is older"
            )
        if self.network_isolation and self.image is None:
            raise ValueError(
                "network_isolation: true requires image: nothing can be installed into AWS's image "
                "there; build the one that `sm-train image RUN --dockerfile` prints"
            )
        return self

    def _check_instance_types(self) -> None:
        for key, name in (
            ("instance_type", self.instance_type),
            *(("alternatives", name) for name in self.alternatives),
        ):
            try:
                nvme_gb = instance_type(name).local_nvme_gb
            except UnknownInstanceTypeError as error:
                raise ValueError(f"{key}: {error}") from None
            if nvme_gb and self.volume_kms_key is not None:
                raise ValueError(
                    f"volume_kms_key: {name} has local NVMe drives, which its hardware encrypts; "
                    "SageMaker accepts no key for them: remove it"
                )
            if nvme_gb and self.volume_gb > nvme_gb:
                raise ValueError(
                    f"volume_gb: {self.volume_gb} is more than the {nvme_gb:.0f} GB of {name}'s "
                    "local NVMe drives, its only storage; remove it"
                )
        if len(set(self.instance_types)) < len(self.instance_types):
            raise ValueError(
                "alternatives: each type may appear only once, including instance_type"
            )
        if self.alternatives and self.capacity not in ("on-demand", "training-plan"):
            raise ValueError(
                "alternatives: require capacity: on-demand or training-plan, not "
                f"{self.capacity}; remove them"
            )

    def _check_image(self) -> None:
        if self.image_credentials is not None and (self.image is None or self.vpc is None):
            missing = "image" if self.image is None else "vpc"
            raise ValueError(
                f"image_credentials: requires {missing}: SageMaker logs in to a private registry "
                "of your own image through your network"
            )
        if self.package_index is not None and self.network_isolation:
            raise ValueError(
                "package_index: with network_isolation: true nothing is installed; remove it"
            )
        if (self.package_index or "").startswith("arn:") and self.backend == "smddp":
            raise ValueError(
                "package_index: with backend: smddp AWS's toolkit installs the packages, and it "
                "logs CodeArtifact's token if pip fails; write backend: nccl, or use an image with "
                "all packages (`sm-train image RUN --dockerfile`)"
            )

    def _check_backend(self) -> None:
        if self.backend != "smddp":
            return
        for name in self.instance_types:
            type_ = instance_type(name)
            if not type_.supports_smddp:
                raise ValueError(
                    f"backend: smddp does not run on {name} (SMDDP supports p4d and p4de only); "
                    "write nccl" + (", which uses EFA there" if type_.supports_efa else "")
                )
        version = self.framework_version
        if self.image is None and version and major_minor(version) not in SMDDP_VERSIONS:
            raise ValueError(
                f"framework_version: {version} has no SMDDP in AWS's image; write {SMDDP_PYTORCH}, "
                "or remove it"
            )

    def _check_capacity(self) -> None:
        for key, capacity in _REQUIRED_CAPACITY.items():
            if getattr(self, key) is not None and self.capacity != capacity:
                raise ValueError(f"{key}: requires capacity: {capacity}, not {self.capacity}")
        if self.capacity == "training-plan" and self.training_plan is None:
            raise ValueError("training_plan: capacity training-plan requires the ARN of the plan")
        if self.capacity == "warm-pool" and self.keep_alive_period is None:
            raise ValueError(
                "keep_alive_period: capacity warm-pool requires a duration, such as 30m"
            )
        if self.max_wait is not None and self.max_wait < self.max_runtime:
            raise ValueError(
                f"max_wait: {self.max_wait} s is less than max_runtime {self.max_runtime} s"
            )


_REQUIRED_CAPACITY = {
    "keep_alive_period": "warm-pool",
    "training_plan": "training-plan",
    "max_wait": "spot",
}
