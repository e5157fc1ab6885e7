"""The run file's ``recovery``: restarts, and fallback clusters and regions without capacity."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.estimators.config.cluster import VpcSection
from sm_train.estimators.config.fields import (
    Bucket,
    Duration,
    Name,
    PositiveInt,
    Region,
    Section,
    reject_bool,
)

MAX_FALLBACKS = 8
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
                {"enum": [kind.name for kind in instance_types()], "type": "string"},
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


class RecoverySection(Section):
    """How `watch` restarts a job that ends before its stage is complete."""

    max_attempts: Annotated[int, BeforeValidator(reject_bool), Field(ge=0, le=100)] = Field(
        default=5,
        description="Number of consecutive jobs without a new checkpoint after which `watch` "
        "gives up; 0 disables restarts.",
    )
    backoff: Annotated[Duration, Field(ge=1, le=3600)] = Field(
        default=60,
        description="Time to wait before the next job. It doubles with each attempt, up to one "
        "hour.",
    )
    fallbacks: Annotated[list[FallbackSection], Field(max_length=MAX_FALLBACKS)] = Field(
        default_factory=list,
        description="Fallback placements to try, in this order, when capacity is unavailable or "
        "lost. After the last one, the run's own placement is tried again.",
    )

    def regions(self, home: str) -> tuple[str, ...]:
        """Return the regions that may hold jobs of the run, ``home`` first."""
        others = {fallback.region for fallback in self.fallbacks} - {None, home}
        return home, *sorted(filter(None, others))
