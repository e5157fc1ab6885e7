"""The run file's ``recovery.fallbacks``: other clusters and regions for missing capacity."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.estimators.config.cluster import VpcSection
from sm_train.estimators.config.fields import Bucket, Name, PositiveInt, Region, Section

MOST_FALLBACKS = 8
"""The regions of all fallbacks must fit into one tag of 256 characters."""


class FallbackStageSection(Section):
    """A stage at a fallback; gradient accumulation adapts to keep the effective batch size."""

    instances: Annotated[PositiveInt, Field(le=10_000)] | None = Field(
        default=None, description="Instances; default: the number with the same number of GPUs."
    )
    per_device_batch_size: PositiveInt | None = Field(
        default=None, description="Micro-batch of a GPU; default: the stage's."
    )


class FallbackSection(Section):
    """One fallback; keys that are not set are as in the rest of the run file."""

    instance_type: str | None = Field(
        default=None,
        description="Another instance type.",
        json_schema_extra=lambda schema: schema.update(
            anyOf=[
                {"enum": [one.name for one in instance_types()], "type": "string"},
                {"type": "null"},
            ]
        ),
    )
    capacity: Literal["on-demand", "spot"] | None = Field(
        default=None,
        description="Capacity; default: the cluster's, or on-demand in place of a training plan.",
    )
    stages: dict[Name, FallbackStageSection] = Field(
        default_factory=dict,
        description="Instances or per_device_batch_size of a stage, by its name.",
    )
    region: Region | None = Field(default=None, description="Another AWS region.")
    buckets: dict[Bucket, Bucket] = Field(
        default_factory=dict,
        description="With another region: for each bucket in the run file, its counterpart there "
        "with the same objects (S3 replication); the counterpart of `bucket` may be empty.",
    )
    vpc: VpcSection | None = Field(default=None, description="With another region: its network.")

    @model_validator(mode="after")
    def _changes_something(self) -> FallbackSection:
        if self.instance_type is not None:
            try:
                instance_type(self.instance_type)
            except UnknownInstanceTypeError as error:
                raise ValueError(f"instance_type: {error}") from None
        if self.region is None and (self.buckets or self.vpc):
            key = "buckets" if self.buckets else "vpc"
            raise ValueError(f"{key}: needs region: it configures another region")
        if not any((self.instance_type, self.capacity, self.stages, self.region)):
            raise ValueError("changes nothing; set instance_type, region or capacity")
        return self
