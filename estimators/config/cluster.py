"""The run file's ``cluster``: the machines, how they are had, and what encloses them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.estimators.config.fields import (
    Duration,
    Image,
    KmsKey,
    Section,
    TrainingPlan,
    VariableName,
    VariableValue,
    Version,
    VpcId,
    no_bool,
)

ENVIRONMENT_LIMIT = 100
OWN_ENVIRONMENT = 8
"""Variables that a request adds to the user's own (estimators.request), at most."""

SMDDP_FRAMEWORK = "2.3.0"
"""PyTorch of the last AWS image that carries SMDDP (AWS Deep Learning Containers, 2024)."""

OLDEST_FRAMEWORK = (2, 3)
"""PyTorch that the training code runs on (setup.cfg, `make test-torch-2.3`)."""

LONGEST_RUN = 28 * 86400
"""Seconds that a training job may run or wait (StoppingCondition in botocore's service model)."""

_LARGEST_VOLUME_GB = 16384


def release(version: str) -> tuple[int, int]:
    """``2.10.0`` as (2, 10)."""
    major, minor, *_ = map(int, version.split("."))
    return major, minor


class VpcSection(Section):
    """The private network of the job."""

    subnets: Annotated[list[VpcId], Field(min_length=1, max_length=16)]
    security_groups: Annotated[list[VpcId], Field(min_length=1, max_length=5)]


class ClusterSection(Section):
    """The machines and how they are had."""

    instance_type: str = Field(
        description="SageMaker's name of the machine, such as ml.p4de.24xlarge.",
        json_schema_extra=lambda schema: schema.update(
            enum=[machine.name for machine in instance_types()]
        ),
    )
    alternatives: Annotated[list[str], Field(max_length=4)] = Field(
        default_factory=list,
        description="Types to take in this order where the first has no capacity, as many of each "
        "as make the same number of GPUs. The price shown is the first's.",
    )
    capacity: Literal["on-demand", "spot", "warm-pool", "training-plan"] = "on-demand"
    keep_alive_period: Annotated[Duration, Field(ge=60, le=21600)] | None = Field(
        default=None, description="capacity: warm-pool. How long machines are kept (and billed)."
    )
    training_plan: TrainingPlan | None = Field(
        default=None, description="capacity: training-plan. The plan's ARN."
    )
    max_wait: Annotated[Duration, Field(ge=1, le=2 * LONGEST_RUN)] | None = Field(
        default=None, description="capacity: spot. Longest wait and run together."
    )
    max_pending: Annotated[Duration, Field(ge=1800, le=LONGEST_RUN)] | None = Field(
        default=None, description="Longest wait for machines; the job is given up after it."
    )
    backend: Literal["auto", "nccl", "smddp"] = Field(
        default="auto", description="Gradient all-reduce: auto takes SMDDP on p4d and p4de."
    )
    image: Image | None = Field(
        default=None, description="Container image (ECR address); AWS's PyTorch image otherwise."
    )
    framework_version: Version | None = Field(
        default=None,
        description="PyTorch version of AWS's image, chosen by collective otherwise; or that of "
        "your own image.",
    )
    retries: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=30)] = Field(
        default=3, description="Restarts by SageMaker after an internal error of its own."
    )
    max_runtime: Annotated[Duration, Field(ge=1, le=LONGEST_RUN)] = Field(
        default=5 * 86400, description="The job is ended after this, retries included."
    )
    volume_gb: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=_LARGEST_VOLUME_GB)] = Field(
        default=30, description="EBS volume; unused on types with local NVMe."
    )
    volume_kms_key: KmsKey | None = Field(
        default=None, description="KMS key of the EBS volume; not for types with local NVMe."
    )
    vpc: VpcSection | None = None
    network_isolation: bool = Field(
        default=False,
        description="The container reaches no network but its peers: nothing can be installed "
        "when it starts, so it needs an image of your own with everything in it.",
    )
    encrypt_traffic: bool = Field(
        default=False, description="Encrypt what machines send each other; slows training."
    )
    remote_debug: bool = Field(
        default=False, description="Allow a shell in the running container through SSM."
    )
    infra_check: bool = Field(
        default=False, description="SageMaker tests machines and network before the job starts."
    )
    environment: dict[VariableName, VariableValue] = Field(
        default_factory=dict,
        max_length=ENVIRONMENT_LIMIT - OWN_ENVIRONMENT,
        description="Environment variables for the job. Nothing secret: they show in the console.",
    )

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Every type the job may run on, the preferred one first."""
        return (self.instance_type, *self.alternatives)

    def instances_of(self, name: str, instances: int) -> int:
        """How many of the type ``name`` have as many GPUs as ``instances`` of the first."""
        gpus = instances * instance_type(self.instance_type).accelerators
        return gpus // instance_type(name).accelerators

    def most_instances(self, instances: int) -> int:
        """Of any type that the job may run on: so many need data of their own."""
        return max(self.instances_of(name, instances) for name in self.instance_types)

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSection:
        self._check_machines()
        self._check_collective()
        self._check_capacity()
        if self.framework_version and release(self.framework_version) < OLDEST_FRAMEWORK:
            raise ValueError(
                f"framework_version: the training code needs PyTorch 2.3 or newer, and "
                f"{self.framework_version} is older"
            )
        if self.network_isolation and self.image is None:
            raise ValueError(
                "network_isolation: true needs image: nothing can be installed into AWS's image "
                "there; build the one that `sm-train image RUN --dockerfile` prints"
            )
        return self

    def _check_machines(self) -> None:
        for key, name in (
            ("instance_type", self.instance_type),
            *(("alternatives", name) for name in self.alternatives),
        ):
            try:
                machine = instance_type(name)
            except UnknownInstanceTypeError as error:
                raise ValueError(f"{key}: {error}") from None
            nvme = machine.local_nvme_gb
            if nvme and self.volume_kms_key is not None:
                raise ValueError(
                    f"volume_kms_key: {name} has local NVMe drives, which its hardware encrypts; "
                    "SageMaker takes no key for them: leave it out"
                )
            if nvme and self.volume_gb > nvme:
                raise ValueError(
                    f"volume_gb: {self.volume_gb} is more than the {nvme:.0f} GB of {name}'s local "
                    "NVMe drives, which are all it has; leave it out"
                )
        if len(set(self.instance_types)) < len(self.instance_types):
            raise ValueError("alternatives: a type can be named only once, instance_type included")
        if self.alternatives and self.capacity != "on-demand":
            raise ValueError(
                f"alternatives: need capacity: on-demand, not {self.capacity}; leave them out"
            )

    def _check_collective(self) -> None:
        if self.backend != "smddp":
            return
        for name in self.instance_types:
            if not instance_type(name).supports_smddp:
                raise ValueError(
                    f"backend: smddp does not run on {name} (SMDDP supports p4d and p4de only); "
                    "write nccl, which uses EFA there"
                )
        version = self.framework_version
        if self.image is None and version and release(version) != release(SMDDP_FRAMEWORK):
            raise ValueError(
                f"framework_version: {version} has no SMDDP; the last AWS image that carries it "
                f"is {SMDDP_FRAMEWORK}"
            )

    def _check_capacity(self) -> None:
        for key, kind in _CAPACITY_KEYS.items():
            if getattr(self, key) is not None and self.capacity != kind:
                raise ValueError(f"{key}: needs capacity: {kind}, not {self.capacity}")
        if self.capacity == "training-plan" and self.training_plan is None:
            raise ValueError("training_plan: capacity training-plan needs the plan's ARN")
        if self.capacity == "warm-pool" and self.keep_alive_period is None:
            raise ValueError("keep_alive_period: capacity warm-pool needs how long, such as 30m")
        if self.max_wait is not None and self.max_wait < self.max_runtime:
            raise ValueError(
                f"max_wait: {self.max_wait} s is less than max_runtime {self.max_runtime} s"
            )


_CAPACITY_KEYS = {
    "keep_alive_period": "warm-pool",
    "training_plan": "training-plan",
    "max_wait": "spot",
}
