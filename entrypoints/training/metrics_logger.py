"""Says what steps came to, as events: from the first process, and from each what is its own."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.data.bad_samples import BadSampleTracker
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.planning.mfu import utilization
from sm_train.entrypoints.training.metrics_window import StepMetricsWindow

MAX_NAMED_SAMPLES = 5
"""Steps or samples that one message names, at most."""


class MetricsLogger:
    """Of one process. ``skipped_in_a_row`` steps up to the last one had no finite gradient.

    ``spoilt`` names the samples of the last loss of this process that was no number.
    """

    def __init__(
        self, settings: JobConfig, accelerator: Accelerator, events: EventLog, loader: Loader
    ) -> None:
        self._settings, self._accelerator = settings, accelerator
        self._events, self._loader = events, loader
        self._utilization = utilization(settings, accelerator.device)
        self.bad = BadSampleTracker(settings.data.max_bad_fraction)
        self._epoch: int | None = None
        self.consecutive_skips = 0
        self.last_nonfinite_loss = ""

    @property
    def effective_batch_size(self) -> int:
        """Images of one optimizer step over all processes that really run."""
        stage = self._settings.stage
        processes: int = self._accelerator.num_processes
        return stage.per_device_batch_size * stage.gradient_accumulation_steps * processes

    def log_epoch(self) -> None:
        """Say once an epoch how it comes out: what is read, repeated or out of sight."""
        epoch = self._loader.epoch
        if epoch == self._epoch or not self._accelerator.is_main_process:
            return
        self._epoch = epoch
        balance = self._loader.epoch_size()
        self._events.write(
            "epoch",
            f"epoch {epoch}: {balance.samples:,} samples in {balance.steps:,} batches of every "
            f"process; {balance.repeated:,} are read twice to make processes equal, "
            f"{balance.unseen:,} are seen by no instance",
            epoch=epoch,
            samples=balance.samples,
            batches=balance.steps,
            repeated=balance.repeated,
            unseen=balance.unseen,
        )

    def log_steps(self, step: int, interval: StepMetricsWindow, learning_rate: float) -> float:
        """Write the interval's ``step`` event; returns its it/s, the same on all processes.

        Every process tells of its own bad samples.
        """
        if (skipped := self.bad.report()) is not None:
            message, reasons = skipped
            self._events.warn("bad-sample", message, reasons=reasons, samples=self.bad.num_seen)
        sums: torch.Tensor = self._accelerator.reduce(interval.sums(), "mean")
        means = interval.means(sums.tolist())
        speed = len(interval) / means.seconds
        images, gpus = speed * self.effective_batch_size, self._accelerator.num_processes
        mfu = self._utilization.share(images, gpus) if self._utilization else None
        if self._accelerator.is_main_process:
            self._events.write(
                "step",
                f"step {step}/{self._settings.stage.max_steps}  "
                f"loss {means.loss:.4f}  {speed:.2f} it/s{f'  MFU {mfu:.0%}' if mfu else ''}",
                step=step,
                epoch=self._loader.epoch,
                loss=means.loss,
                learning_rate=learning_rate,
                gradient_norm=means.gradient_norm,
                steps_per_second=speed,
                images_per_second=images,
                data_wait_share=means.waited_share,
                mfu=mfu,
            )
        self.consecutive_skips = self.consecutive_skips + means.skipped if means.skipped else 0
        if means.skipped:
            self._tell_skipped(interval)
        return speed

    def _tell_skipped(self, interval: StepMetricsWindow) -> None:
        """Which steps were left out; every process names the samples of its own bad losses."""
        if self._accelerator.is_main_process:
            steps = interval.skipped_steps()
            shown = ", ".join(map(str, steps[:MAX_NAMED_SAMPLES])) + (
                ", …" if len(steps) > MAX_NAMED_SAMPLES else ""
            )
            self._events.warn(
                "step-skipped",
                f"{len(steps)} steps had no finite gradient and were left out: {shown}",
                steps=steps,
            )
        for step, origins in interval.nonfinite_steps()[:MAX_NAMED_SAMPLES]:
            names = self._loader.sample_names(origins)
            self.last_nonfinite_loss = f"step {step}: {', '.join(names)}"
            message = f"the loss was no number in {self.last_nonfinite_loss}"
            self._events.warn("loss-not-finite", message, step=step, samples=names)
