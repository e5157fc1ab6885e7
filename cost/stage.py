"""One stage of a run as numbers, and what follows from them: derived here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sm_train.cost.instances import instance_type

ThroughputSource = Literal["run file", "option", "measured", "unknown"]


@dataclass(frozen=True)
class Stage:
    """A stage on a cluster; None is unknown.

    ``iterations`` are optimizer steps. ``throughput_source`` says where
    ``iterations_per_second`` is from; a figure belongs to its resolution, batch and cluster.

    Raises:
        ValueError: a figure is not positive and finite; the message names it.
    """

    name: str
    resolution: int | None
    instance_type: str
    instances: int
    per_gpu_batch: int | None
    accumulation: int
    iterations: int
    iterations_per_second: float | None
    throughput_source: ThroughputSource
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        for field in ("instances", "accumulation", "iterations", "iterations_per_second"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{field}: {value} must be a positive number")

    @property
    def gpus_per_instance(self) -> int:
        return instance_type(self.instance_type).accelerators

    @property
    def world_size(self) -> int:
        """GPUs of the stage: one process each."""
        return self.instances * self.gpus_per_instance

    @property
    def effective_batch_size(self) -> int | None:
        """Images of one optimizer step over all GPUs."""
        if self.per_gpu_batch is None:
            return None
        return self.per_gpu_batch * self.accumulation * self.world_size

    @property
    def images_per_second(self) -> float | None:
        """Images of the whole cluster a second."""
        if self.effective_batch_size is None or self.iterations_per_second is None:
            return None
        return self.effective_batch_size * self.iterations_per_second
