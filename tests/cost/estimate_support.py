"""Helpers of the tests of estimate, which other tests use as well."""

from __future__ import annotations

from sm_train.cost.speed import stated_speed
from sm_train.cost.stage import CostStage

# BRIA's published stage: 4 × ml.p4de.24xlarge, 1.8 it/s, effective batch 2048, at 256 px.
BRIA = CostStage(
    name="256px",
    resolution=256,
    instance_type="ml.p4de.24xlarge",
    instances=4,
    per_device_batch_size=32,
    gradient_accumulation_steps=2,
    max_steps=550_000,
    checkpoint_every=1000,
    speed=stated_speed(1.8, "published"),
)
