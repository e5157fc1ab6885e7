"""Helpers of the tests of break even, which other tests use as well."""

from __future__ import annotations

from sm_train.cost.speed import stated_speed
from sm_train.cost.stage import CostStage

NAME = "ml.p5.48xlarge"


STAGE = CostStage(
    name="a",
    resolution=256,
    instance_type=NAME,
    instances=4,
    per_device_batch_size=8,
    gradient_accumulation_steps=1,
    max_steps=360_000,
    speed=stated_speed(1.0, "a job"),
)
