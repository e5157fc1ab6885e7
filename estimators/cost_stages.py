"""A run file as the stages that the cost model prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import stated_speed

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig


def cost_stages(config: RunConfig) -> list[CostStage]:
    """The run's stages in order, each at the it/s that the run file states for it, if any."""
    return [
        CostStage(
            name=stage.name,
            resolution=stage.resolution,
            instance_type=config.cluster.instance_type,
            instances=stage.instances,
            per_gpu_batch=stage.per_gpu_batch,
            accumulation=stage.accumulation,
            iterations=stage.iterations,
            checkpoint_every=config.checkpoint.every,
            checkpoints_kept=config.checkpoint.keep,
            keep_alive_seconds=config.cluster.keep_alive or 0,
            speed=stated_speed(stage.iterations_per_second, "the run file states it")
            if stage.iterations_per_second
            else None,
        )
        for stage in config.stages
    ]
