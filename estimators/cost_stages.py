"""Convert a run file to the stages that the cost model prices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sm_train.cost.speed import stated_speed
from sm_train.cost.stage import CostStage

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig


def cost_stages(config: RunConfig) -> list[CostStage]:
    """Return the run's stages in order, with the steps per second that the run file states."""
    return [
        CostStage(
            name=stage.name,
            resolution=stage.resolution,
            instance_type=config.cluster.instance_type,
            instances=stage.instances,
            per_device_batch_size=stage.per_device_batch_size,
            gradient_accumulation_steps=stage.gradient_accumulation_steps,
            max_steps=stage.max_steps,
            samples=config.data.samples,
            checkpoint_every=config.checkpoint.every_steps if config.checkpoint.save else None,
            # One older stays until the next one is written.
            checkpoints_kept=config.checkpoint.keep_last + 1,
            precision=config.training.precision,
            reduce_dtype=config.training.reduce_dtype,
            sharding=stage.sharding,
            activation_checkpointing=stage.activation_checkpointing,
            keep_alive_seconds=config.cluster.keep_alive_period or 0,
            max_runtime_seconds=config.cluster.max_runtime,
            max_jobs=max(1, config.recovery.max_attempts),
            speed=stated_speed(stage.steps_per_second, "the run file states it")
            if stage.steps_per_second and stage.is_measured_here(config.cluster.instance_type)
            else None,
        )
        for stage in config.stages
    ]


def stages_measured_elsewhere(config: RunConfig) -> list[CostStage]:
    """Return the stages whose stated speed belongs to another configuration, as they are there."""
    elsewhere = []
    for stage, priced in zip(config.stages, cost_stages(config), strict=True):
        there, speed = stage.measured_on, stage.steps_per_second
        if speed and there and not stage.is_measured_here(config.cluster.instance_type):
            elsewhere.append(
                replace(
                    priced,
                    instance_type=there.instance_type,
                    instances=there.instances,
                    per_device_batch_size=there.per_device_batch_size,
                    gradient_accumulation_steps=there.gradient_accumulation_steps,
                    speed=stated_speed(speed, "the run file states it"),
                )
            )
    return elsewhere
