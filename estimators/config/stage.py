"""The run file's ``stages``: one training job each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator
from sm_train.cost.instances import instance_type
from sm_train.cost.speed_model import ActivationCheckpointing
from sm_train.entrypoints.job_interface.job_config import (
    InitFrom,
    OptimizerState,
    PredictionType,
    Sharding,
    StageConfig,
)
from sm_train.estimators.config.data import SourceSection
from sm_train.estimators.config.fields import (
    FunctionName,
    Name,
    PositiveFloat,
    PositiveInt,
    Section,
    reject_bool,
)

PRESET_OBJECTIVE = "preset"
"""The value of a stage's ``objective`` for the preset's loss."""


class MeasuredOnSection(Section):
    """The configuration of a measured speed."""

    instance_type: str = Field(description="Instance type, such as ml.p4de.24xlarge.")
    instances: PositiveInt = Field(description="Number of instances.")
    per_device_batch_size: PositiveInt = Field(
        description="Number of images per GPU in one forward and backward pass."
    )
    gradient_accumulation_steps: PositiveInt = Field(
        default=1, description="Number of forward and backward passes per optimizer step."
    )

    @field_validator("instance_type")
    @classmethod
    def _check_type(cls, name: str) -> str:
        if instance_type(name).accelerators < 1:
            raise ValueError(f"{name} has no GPU")
        return name


class StageSection(Section):
    """One resolution on one cluster size: one training job."""

    name: Name = Field(description="Name of the stage, part of its job names.")
    resolution: Annotated[int, BeforeValidator(reject_bool), Field(ge=8, le=4096)] = Field(
        description="Side length of the square training images, in pixels."
    )
    instances: Annotated[PositiveInt, Field(le=10_000)] = Field(
        description="Number of instances of cluster.instance_type."
    )
    per_device_batch_size: PositiveInt = Field(
        description="Number of images per GPU in one forward and backward pass."
    )
    gradient_accumulation_steps: PositiveInt = Field(
        default=1, description="Number of forward and backward passes per optimizer step."
    )
    effective_batch_size: PositiveInt | None = Field(
        default=None,
        description="Number of images per optimizer step. If set, it is checked against "
        "per_device_batch_size × gradient_accumulation_steps × instances × GPUs per instance.",
    )
    max_steps: PositiveInt = Field(description="Number of optimizer steps of the stage.")
    learning_rate: PositiveFloat = Field(description="Learning rate of AdamW after the warm-up.")
    sharding: Sharding | Literal["auto"] = Field(
        default="auto",
        description="What FSDP2 shards across the GPUs: none replicates everything (DDP), "
        "shard_grad_op shards gradients and optimizer state, full_shard the weights too, "
        "hybrid_shard the weights within each instance. auto is none if a GPU holds the stage, "
        "hybrid_shard if an instance does, and otherwise full_shard; the run records the choice.",
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        default=False,
        description="Whether to recompute activations in the backward pass: less memory for a "
        "third more computation. selective recomputes every second layer: half of both.",
    )
    init_from: InitFrom = Field(
        default="ema",
        description="Which weights of the previous stage to start from: the moving average or the "
        "raw weights.",
    )
    optimizer_state: OptimizerState = Field(
        default="reset",
        description="Whether to keep AdamW's state of the previous stage or to reset it.",
    )
    prediction_type: PredictionType | None = Field(
        default=None,
        description="What the network predicts in this stage, in place of model.prediction_type. "
        "It has to unlearn what an earlier stage trained. Not for the first stage.",
    )
    objective: FunctionName | None = Field(
        default=None,
        description="Loss of this stage in place of training.objective: module:function of `code`, "
        "or `preset` for the preset's. Not for the first stage.",
    )
    sources: list[SourceSection] = Field(
        default_factory=list,
        max_length=10,
        description="Sources of this stage, in place of `data.sources`.",
    )
    steps_per_second: PositiveFloat | None = Field(
        default=None,
        description="Optimizer steps per second, measured on exactly this stage, or on the "
        "configuration of `measured_on`. The cost estimate uses it.",
    )
    measured_on: MeasuredOnSection | None = Field(
        default=None,
        description="Configuration that steps_per_second was measured on. None is this stage's, as "
        "the file states it. For another one, the estimate carries the speed by the ratio of the "
        "speed model's predictions.",
    )

    _sharding_reason: str | None = PrivateAttr(default=None)

    @property
    def sharding_reason(self) -> str | None:
        """Why `auto` is this strategy; None if the run file or the run's record states it."""
        return self._sharding_reason

    def with_sharding(self, strategy: Sharding, reason: str) -> StageSection:
        """Return the stage with the strategy that `auto` stands for, and why."""
        stage = self.model_copy(update={"sharding": strategy})
        stage._sharding_reason = reason
        return stage

    def measured_on_section(self, instance_type: str) -> MeasuredOnSection:
        """Return the configuration of `steps_per_second` in a run on ``instance_type``."""
        return self.measured_on or self._here(instance_type)

    def is_measured_here(self, instance_type: str) -> bool:
        """Return whether `steps_per_second` belongs to this stage on ``instance_type``."""
        return self.measured_on in (None, self._here(instance_type))

    def _here(self, instance_type: str) -> MeasuredOnSection:
        return MeasuredOnSection(
            instance_type=instance_type,
            instances=self.instances,
            per_device_batch_size=self.per_device_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
        )

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, objective: str | None) -> str | None:
        if objective not in (None, PRESET_OBJECTIVE) and ":" not in str(objective):
            raise ValueError(
                f"must be a module:function of your code, such as losses:huber, or "
                f"{PRESET_OBJECTIVE}"
            )
        return objective

    def job_config(self) -> StageConfig:
        """Return what the job reads of the stage, whose sharding has been chosen."""
        if self.sharding == "auto":
            raise ValueError(f"stage {self.name}: sharding: auto has not been resolved")
        if self.sharding_reason is None:
            return self._job_struct(StageConfig)
        return self._job_struct(StageConfig, sharding_reason=f"auto: {self.sharding_reason}")
