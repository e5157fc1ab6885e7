"""A run file as the stages that the cost model prices."""

from __future__ import annotations

from sm_train.cost.stage import Stage
from sm_train.estimators.run_config import RunConfig


def cost_stages(config: RunConfig) -> list[Stage]:
    """The run's stages in order, each with the it/s that the run file states for it."""
    return [
        Stage(
            name=stage.name,
            resolution=stage.resolution,
            instance_type=config.cluster.instance_type,
            instances=stage.instances,
            per_gpu_batch=stage.per_gpu_batch,
            accumulation=stage.accumulation,
            iterations=stage.iterations,
            iterations_per_second=stage.iterations_per_second,
            throughput_source="run file" if stage.iterations_per_second else "unknown",
            checkpoint_every=config.checkpoint.every,
        )
        for stage in config.stages
    ]
