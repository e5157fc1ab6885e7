"""The run file's ``recovery.fallbacks``: where else a run may go when machines cannot be had."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.estimators.config.cluster import VpcSection
from sm_train.estimators.config.fields import Bucket, Name, PositiveInt, Region, Section

MOST_FALLBACKS = 8
"""The regions of all of them go into one tag of 256 characters."""


class FallbackStageSection(Section):
    """What a stage has there; accumulation follows, so that a step's batch stays the same."""

    instances: Annotated[PositiveInt, Field(le=10_000)] | None = Field(
        default=None, description="As many as make the same number of GPUs otherwise."
    )
    per_device_batch_size: PositiveInt | None = Field(
        default=None, description="The stage's own otherwise."
    )


class FallbackSection(Section):
    """One other place; what is not named is as in the rest of the run file."""

    instance_type: str | None = Field(
        default=None,
        description="Another type of machine.",
        json_schema_extra=lambda schema: schema.update(
            anyOf=[
                {"enum": [machine.name for machine in instance_types()], "type": "string"},
                {"type": "null"},
            ]
        ),
    )
    capacity: Literal["on-demand", "spot"] | None = Field(
        default=None, description="The cluster's own otherwise; on-demand in place of a plan."
    )
    stages: dict[Name, FallbackStageSection] = Field(
        default_factory=dict,
        description="By a stage's name: its instances or per_device_batch_size there.",
    )
    region: Region | None = Field(default=None, description="Another AWS region.")
    buckets: dict[Bucket, Bucket] = Field(
        default_factory=dict,
        description="Another region: each bucket that the run file names, and the one there that "
        "holds the same objects (S3 replication); the run's own may be empty.",
    )
    vpc: VpcSection | None = Field(default=None, description="Another region: the network there.")

    @model_validator(mode="after")
    def _names_something(self) -> FallbackSection:
        if self.instance_type is not None:
            try:
                instance_type(self.instance_type)
            except UnknownInstanceTypeError as error:
                raise ValueError(f"instance_type: {error}") from None
        if self.region is None and (self.buckets or self.vpc):
            key = "buckets" if self.buckets else "vpc"
            raise ValueError(f"{key}: belongs to another region; name it with region")
        if not any((self.instance_type, self.capacity, self.stages, self.region)):
            raise ValueError("names nothing that differs; give instance_type, region or capacity")
        return self
