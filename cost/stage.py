"""One stage of a run as numbers, and what follows from them: derived here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sm_train.cost.instances import instance_type

_MOST = 10**12
"""No real count comes near, and every float holds it exactly."""
_LONGEST_SECONDS = 100 * 365 * 86400
"""A century: longer is a slip of the pen."""

_POSITIVE = (
    "resolution instances per_gpu_batch accumulation iterations iterations_per_second "
    "checkpoint_every".split()
)

ThroughputSource = Literal["run file", "option", "measured", "unknown"]


@dataclass(frozen=True)
class Stage:
    """A stage on a cluster; None is unknown.

    ``iterations`` are optimizer steps. ``throughput_source`` says where
    ``iterations_per_second`` is from; a figure belongs to its resolution, batch and cluster.

    Raises:
        ValueError: a figure is not positive and finite, or the training would take more than a
            century; the message names it.
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
        for field in _POSITIVE:
            value = getattr(self, field)
            if value is not None and not 0 < value <= _MOST:
                raise ValueError(f"{field}: {value} must be a positive number, at most {_MOST:.0e}")
        seconds = self.training_seconds
        if seconds is not None and seconds > _LONGEST_SECONDS:
            raise ValueError(
                f"iterations_per_second: at {self.iterations_per_second} the {self.iterations} "
                f"iterations of {self.name} take over 100 years; give optimizer steps a second"
            )

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
    def training_seconds(self) -> float | None:
        """Iterations alone: no start-up, no restart."""
        speed = self.iterations_per_second
        return None if speed is None else self.iterations / speed

    @property
    def images_per_second(self) -> float | None:
        """Images of the whole cluster a second."""
        if self.effective_batch_size is None or self.iterations_per_second is None:
            return None
        return self.effective_batch_size * self.iterations_per_second
