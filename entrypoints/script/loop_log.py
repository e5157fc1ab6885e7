"""The events of one rank's loop: an interval is logged every ``log_every`` steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.script.step_events import LoopFacts, StepEvents, StepWindow


@dataclass(frozen=True)
class StepValues:
    """Values of the last step; ``gradient_norm`` is a number or a scalar tensor."""

    learning_rate: float | None
    gradient_norm: Any
    epoch: int | None


class LoopLog:
    """Collects the steps of one rank; rank 0 writes events once the loop has begun.

    ``window`` is the open interval, ``norm`` the newest gradient norm of a script that Accelerate
    clips, and ``own_values`` those of a loop that reports its steps itself.
    """

    def __init__(
        self, config: JobConfig, resources: ResourceConfig, events: EventLog, *, is_main: bool
    ) -> None:
        self._config, self._resources, self._events = config, resources, events
        self._is_main = is_main
        self._step_events: StepEvents | None = None
        self.window = StepWindow()
        self.steps_per_second = 0.0
        self.observes_data = False
        self.norm: Any = None
        self.own_values: StepValues | None = None

    def begin(self, facts: LoopFacts) -> None:
        """Log the ``start`` event, on rank 0."""
        self._step_events = StepEvents(self._config, self._resources, self._events, facts)

    def add_loss(self, loss: Any) -> None:
        """Keep the loss of a step on its device; on rank 0 only."""
        if self._is_main and loss is not None:
            self.window.losses.append(loss.detach())

    def add_steps(self, count: int) -> bool:
        """Add ``count`` steps; return whether the interval is complete."""
        self.window.steps += count
        return self.window.steps >= self._config.training.log_every

    def flush(self, step: int, values: StepValues) -> None:
        """Log the interval that ends at ``step``."""
        window, self.window = self.window, StepWindow()
        if not window.steps:
            return
        self.steps_per_second = window.steps_per_second
        if self._step_events is not None:
            self._step_events.step(
                step,
                window,
                learning_rate=values.learning_rate,
                gradient_norm=_local_value(values.gradient_norm),
                epoch=values.epoch,
                observes_data=self.observes_data,
            )
        self.norm = None

    def end(self, step: int, reason: str) -> None:
        """Log how the loop ended."""
        if self._step_events is not None:
            self._step_events.end(step, reason)
            return
        self._events.write(
            "end",
            f"{self._config.entry} ended: {reason}",
            step=step,
            reason=reason,
            training_seconds=0.0,
            images=0,
            steps_per_second=None,
        )


def _local_value(tensor: Any) -> float | None:
    """Return a scalar; None for one that is distributed over the ranks."""
    return None if tensor is None or hasattr(tensor, "full_tensor") else float(tensor)
