"""Step metrics: summed on the device, then logged as events once per interval.

Rank 0 logs averages over all ranks. Every rank logs what only it knows: its bad samples and the
samples of its non-finite losses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from sm_train.entrypoints.data_loading.loader import Loader
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.monitoring.heartbeat import TrainingClock
from sm_train.entrypoints.planning.mfu import mfu_meter
from sm_train.entrypoints.training.compilation import CompilationClock
from torch import Tensor

MAX_LISTED = 5
"""Maximum number of steps or samples that one message lists."""

"""A sample: the number of its shard and its index in the shard."""


@dataclass(frozen=True)
class StepMetrics:
    """Averages over an interval's steps and all ranks.

    ``loss`` and ``gradient_norm`` are averages of the steps that were not skipped, NaN if all were.
    ``seconds`` is the duration of all steps without checkpoints, ``data_wait_share`` the fraction
    spent on waiting for data.
    """

    loss: float
    gradient_norm: float
    seconds: float
    data_wait_share: float
    skipped: int


RECENT_STEPS = 1000
"""Steps of which at most ``training.max_nonfinite_share`` may be skipped."""


class SkippedSteps:
    """Which of the latest steps changed no weight, counted on the device.

    ``consecutive`` is the number of skipped steps since the last finite one, ``recent`` the number
    of skipped steps among the last :data:`RECENT_STEPS`. Both are as of the last :meth:`update`,
    and equal on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._run = torch.zeros((), device=device)
        self._flags = torch.zeros(RECENT_STEPS, device=device)
        self._steps = 0
        self.consecutive = self.recent = 0

    def add(self, skipped: Tensor) -> None:
        """Add one step; ``skipped`` is a scalar, 1.0 if it changed no weight."""
        self._run = (self._run + 1) * skipped
        self._flags[self._steps % RECENT_STEPS] = skipped
        self._steps += 1

    def counts(self) -> Tensor:
        """Return both counts (2,), which :meth:`update` takes when they are on the host."""
        return torch.stack([self._run, self._flags.sum()])

    def update(self, consecutive: float, recent: float) -> None:
        """Set the counts."""
        self.consecutive, self.recent = round(consecutive), round(recent)

    def read(self) -> None:
        """Update the counts; waits for the device."""
        self.update(*self.counts().tolist())

    def restart_run(self) -> None:
        """Count consecutive steps from here on: the weights are those of an earlier step."""
        self._run = torch.zeros_like(self._run)
        self.consecutive = 0


class StepMetricsWindow:
    """Metrics of one rank's consecutive steps between two ``step`` events.

    Values stay on the device until the end of the interval, so no step waits for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.started = time.monotonic()
        self.data_wait_seconds = 0.0
        self.checkpoint_seconds = 0.0
        self._device = device
        self._steps: list[int] = []
        self._losses: list[Sequence[Tensor]] = []
        self._norms: list[Tensor] = []
        self._skipped: list[Tensor] = []
        self._samples: list[Sequence[str]] = []

    def __len__(self) -> int:
        return len(self._steps)

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Leave the time of the block out of the interval's duration."""
        began = time.monotonic()
        yield
        self.checkpoint_seconds += time.monotonic() - began

    def add(
        self,
        step: int,
        losses: Sequence[Tensor],
        norm: Tensor,
        skipped: Tensor,
        samples: Sequence[str],
    ) -> None:
        """Add one step.

        ``losses`` are scalars, one per micro-batch of this rank, which sum to the step's loss on
        ``samples``. ``skipped`` is a scalar, 1.0 if the step changed no weight, equal on all ranks.
        """
        self._steps.append(step)
        self._losses.append(losses)
        self._norms.append(norm)
        self._skipped.append(skipped)
        self._samples.append(samples)

    def sums(self) -> Tensor:
        """Return this rank's sums (5,); average them over all ranks and pass to :meth:`means`."""
        seconds = max(time.monotonic() - self.started - self.checkpoint_seconds, 1e-9)
        skipped = torch.stack(self._skipped)
        # A skipped step's loss and norm may be NaN, which would spread through a sum.
        loss, norm = (
            torch.where(skipped > 0, 0.0, values).sum()
            for values in (self._step_losses(), torch.stack(self._norms))
        )
        clock = torch.tensor([seconds, self.data_wait_seconds / seconds], device=self._device)
        return torch.stack([loss, norm, *clock, skipped.sum()])

    def _step_losses(self) -> Tensor:
        """Return the loss of each step, (steps,)."""
        losses = torch.stack([loss for losses in self._losses for loss in losses])
        return losses.view(len(self), -1).sum(1)

    def means(self, sums: Sequence[float]) -> StepMetrics:
        """Return the averages per step from :meth:`sums`, averaged over all ranks."""
        loss, norm, seconds, data_wait_share, skipped = sums
        taken = len(self) - round(skipped)
        if not taken:
            nan = float("nan")
            return StepMetrics(nan, nan, seconds, data_wait_share, len(self))
        return StepMetrics(loss / taken, norm / taken, seconds, data_wait_share, len(self) - taken)

    def skipped_steps(self) -> list[int]:
        """Return the steps that changed no weight; waits for the device."""
        flags = torch.stack(self._skipped).tolist()
        return [step for step, flag in zip(self._steps, flags, strict=True) if flag]

    def nonfinite_steps(self) -> list[tuple[int, Sequence[str]]]:
        """Return the steps in which this rank's loss was not finite, with their samples."""
        finite = torch.isfinite(self._step_losses()).tolist()
        steps = zip(self._steps, self._samples, finite, strict=True)
        return [(step, samples) for step, samples, is_finite in steps if not is_finite]


class MetricsLogger:
    """Logs one rank's metrics.

    ``clock`` has the speed since the start, ``compilation`` the time that layers take to compile.
    ``skips`` are the steps without a finite gradient. ``last_nonfinite_loss`` names the samples of
    this rank's last non-finite loss, else is empty.
    """

    def __init__(
        self, config: JobConfig, accelerator: Accelerator, events: EventLog, loader: Loader
    ) -> None:
        self._config, self._accelerator = config, accelerator
        self._events, self._loader = events, loader
        self._mfu_meter = mfu_meter(config, accelerator.device)
        self._logged_epoch: int | None = None
        self.clock = TrainingClock()
        self.compilation = CompilationClock()
        self.skips = SkippedSteps(accelerator.device)
        self.last_nonfinite_loss = ""

    @property
    def effective_batch_size(self) -> int:
        """Images of one optimizer step over all ranks."""
        stage = self._config.stage
        world_size: int = self._accelerator.num_processes
        return stage.per_device_batch_size * stage.gradient_accumulation_steps * world_size

    def log_epoch(self) -> None:
        """Log an epoch's size at its first batch: samples read, repeated and not visible."""
        epoch = self._loader.epoch
        if epoch == self._logged_epoch or not self._accelerator.is_main_process:
            return
        self._logged_epoch = epoch
        size = self._loader.epoch_size()
        how = "drawn at random"
        if size.repeated is not None:
            how = (
                f"{size.repeated:,} are read twice to give all processes equally many batches, "
                f"{size.unseen:,} are not visible to any instance"
            )
        self._events.write(
            "epoch",
            f"epoch {epoch}: {size.samples:,} samples in {size.steps:,} batches per process; {how}",
            epoch=epoch,
            samples=size.samples,
            batches=size.steps,
            repeated=size.repeated,
            unseen=size.unseen,
        )

    def log_steps(self, step: int, window: StepMetricsWindow, learning_rate: float) -> float:
        """Log an interval that ends at ``step``; return its steps per second, equal on all ranks.

        A collective: all ranks call it after the same step.
        """
        self._loader.report_bad_samples()
        values = torch.cat([window.sums(), self.skips.counts()])
        *sums, consecutive, recent = self._accelerator.reduce(values, "mean").tolist()
        metrics = window.means(sums)
        self.skips.update(consecutive, recent)
        steps_per_second = len(window) / metrics.seconds
        waited = metrics.data_wait_share * metrics.seconds
        timed = self.clock.add(len(window), metrics.seconds, waited)
        images_per_second = steps_per_second * self.effective_batch_size
        mfu = None
        if self._mfu_meter:
            mfu = self._mfu_meter.mfu(images_per_second, self._accelerator.num_processes)
        if self._accelerator.is_main_process:
            self._events.write(
                "step",
                f"step {step}/{self._config.stage.max_steps}  loss {metrics.loss:.4f}  "
                f"{steps_per_second:.2f} it/s{f'  MFU {mfu:.0%}' if mfu else ''}",
                step=step,
                epoch=self._loader.epoch,
                loss=metrics.loss,
                learning_rate=learning_rate,
                gradient_norm=metrics.gradient_norm,
                steps_per_second=steps_per_second,
                images_per_second=images_per_second,
                data_wait_share=metrics.data_wait_share,
                mfu=mfu,
                compile_seconds=self.compilation.take(),
                **timed,
            )
        if metrics.skipped:
            self._log_skipped(window)
        return steps_per_second

    def log_withheld(self, step: int) -> None:
        """Log that the checkpoint due at ``step`` waits for a step with a finite gradient."""
        if self._accelerator.is_main_process:
            self._events.warn(
                "checkpoint-withheld",
                f"the checkpoint of step {step} waits for a step with a finite gradient: "
                f"{self.skips.consecutive} steps up to this one had none",
                step=step,
                skipped=self.skips.consecutive,
            )

    def _log_skipped(self, window: StepMetricsWindow) -> None:
        """Log the skipped steps on rank 0; every rank names the samples of its own bad losses."""
        if self._accelerator.is_main_process:
            steps = window.skipped_steps()
            listed = ", ".join(map(str, steps[:MAX_LISTED])) + (
                ", …" if len(steps) > MAX_LISTED else ""
            )
            self._events.warn(
                "step-skipped",
                f"{len(steps)} steps had no finite gradient and were skipped: {listed}",
                steps=steps,
            )
        for step, names in window.nonfinite_steps()[:MAX_LISTED]:
            self.last_nonfinite_loss = f"step {step}: {', '.join(names)}"
            message = f"the loss was not finite in {self.last_nonfinite_loss}"
            self._events.warn("loss-non-finite", message, step=step, samples=list(names))
