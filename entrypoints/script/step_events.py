"""The ``start``, ``step`` and ``end`` events of a loop that is not the built-in training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig
from sm_train.entrypoints.distributed.backend import gpu_name
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.monitoring.heartbeat import TrainingClock


@dataclass(frozen=True)
class LoopFacts:
    """What a loop does as it begins. Batch sizes are samples, ``batch_size`` of one rank.

    ``unobserved`` names what its events lack.
    """

    world_size: int
    batch_size: int
    gradient_accumulation_steps: int
    parameters: int
    backend: str
    backend_reason: str
    precision: str
    first_step: int
    unobserved: tuple[str, ...] = ()

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.world_size


class StepWindow:
    """The steps between two ``step`` events."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.steps = 0
        self.losses: list[Any] = []
        self.data_wait_seconds = 0.0
        self.excluded_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The duration without checkpoints."""
        return max(time.monotonic() - self.started - self.excluded_seconds, 1e-9)

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds

    def loss(self) -> float | None:
        """Return the mean loss of this process; waits for the device."""
        if not self.losses:
            return None
        import torch

        return float(torch.stack([loss.float() for loss in self.losses]).mean())


class StepEvents:
    """Writes the events of one loop; only rank 0 calls it."""

    def __init__(
        self, config: JobConfig, resources: ResourceConfig, events: EventLog, facts: LoopFacts
    ) -> None:
        self._config, self._events, self._facts = config, events, facts
        self._began, self._clock = time.monotonic(), TrainingClock()
        stage = config.stage
        events.write(
            "start",
            f"{config.run} {stage.name}: {config.entry}, {facts.parameters:,} parameters, "
            f"{facts.world_size} processes on {len(resources.hosts)} nodes, {facts.backend}",
            run=config.run,
            stage=stage.name,
            resolution=stage.resolution,
            world_size=facts.world_size,
            nodes=len(resources.hosts),
            instance_type=resources.instance_type,
            accelerator=gpu_name(),
            per_device_batch_size=facts.batch_size,
            gradient_accumulation_steps=facts.gradient_accumulation_steps,
            effective_batch_size=facts.samples_per_step,
            max_steps=stage.max_steps,
            parameters=facts.parameters,
            backend=facts.backend,
            backend_reason=facts.backend_reason,
            precision=facts.precision,
            resumed_from_step=facts.first_step,
            entry=config.entry,
            unobserved=list(facts.unobserved),
        )
        if facts.unobserved:
            text = "; ".join(facts.unobserved)
            events.warn("entry-unobserved", f"{config.entry}: not observed: {text}")
        actual = facts.batch_size * facts.gradient_accumulation_steps
        if actual != stage.per_device_batch_size * stage.gradient_accumulation_steps:
            events.warn(
                "entry-batch-differs",
                f"{config.entry} takes {facts.batch_size} × {facts.gradient_accumulation_steps} "
                f"samples per GPU and step, the run file states {stage.per_device_batch_size} × "
                f"{stage.gradient_accumulation_steps}: the estimates are for another batch size",
            )

    def step(
        self,
        step: int,
        window: StepWindow,
        *,
        learning_rate: float | None,
        gradient_norm: float | None,
        epoch: int | None,
        observes_data: bool,
    ) -> None:
        """Log the interval that ends at ``step``."""
        loss, speed = window.loss(), window.steps_per_second
        shown = "" if loss is None else f"  loss {loss:.4f}"
        seconds = window.seconds
        waited = min(window.data_wait_seconds, seconds) if observes_data else None
        timed = self._clock.add(window.steps, seconds, waited)
        self._events.write(
            "step",
            f"step {step}/{self._config.stage.max_steps}{shown}  {speed:.2f} it/s",
            step=step,
            epoch=epoch,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            steps_per_second=speed,
            images_per_second=speed * self._facts.samples_per_step,
            data_wait_share=None if waited is None else waited / seconds,
            mfu=None,
            **timed,
        )

    def end(self, step: int, reason: str) -> None:
        """Log how the loop ended, after everything that it leaves has been written."""
        seconds, steps = time.monotonic() - self._began, step - self._facts.first_step
        self._events.write(
            "end",
            f"{self._config.entry} ended at step {step}: {reason}",
            step=step,
            reason=reason,
            training_seconds=seconds,
            images=steps * self._facts.samples_per_step,
            steps_per_second=self._clock.steps_per_second or (steps / seconds if steps else None),
        )
