"""The training loop of one stage: steps, checkpoints, and an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.common.checkpoint_layout import SAMPLER_FILE
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.common.signals import StopSignal
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.shard_catalog import DataRank, ShardCatalog
from sm_train.entrypoints.distributed import fsdp
from sm_train.entrypoints.distributed.local_shard import full_tensor
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.objectives import loss
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase
from sm_train.entrypoints.training.evaluator import Evaluator, ValidationSet
from sm_train.entrypoints.training.metrics_logger import MAX_NAMED_SAMPLES, MetricsLogger
from sm_train.entrypoints.training.metrics_window import SampleId, StepMetricsWindow
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.parallelize import (
    ParallelPlan,
    gpu_memory,
    move_frozen,
    parallelize,
)
from sm_train.entrypoints.training.train_state import TrainState
from torch import Tensor, nn

STOP_CHECK_SECONDS = 5.0
"""How long a SIGTERM may wait until all processes agree to stop, which takes a collective.

SageMaker kills after 120 seconds, torchrun after 30 of its own.
"""

WRITTEN_CHECK_SECONDS = 1.0
"""How often processes ask each other, in the same way, whether a checkpoint is written."""


class Trainer:
    """Trains one stage from where its newest checkpoint left off.

    ``model`` is what the learner trains, wrapped for all processes.
    """

    def __init__(
        self,
        settings: JobConfig,
        parts: ModelComponents,
        accelerator: Accelerator,
        directories: SageMakerPaths,
        events: EventLog,
        catalogue: ShardCatalog,
        seat: DataRank,
        held_out: ValidationSet | None = None,
    ) -> None:
        self.config, self.components, self.accelerator = settings, parts, accelerator
        self.paths, self.events = directories, events
        self.device: torch.device = accelerator.device
        self.plan = ParallelPlan.choose(
            settings,
            parts.built.part,
            accelerator.num_processes,
            seat.local_world_size,
            gpu_memory(self.device),
        )
        # Entering a context that does nothing takes longer than the batch's arithmetic.
        self._autocast = accelerator.autocast if accelerator.native_amp else nullcontext
        move_frozen(self.plan, parts, self.device)
        module = parallelize(self.plan, settings, parts, accelerator, seat.local_world_size)
        # Wrapping may move weights to other memory; what learns them takes hold of them after.
        self.model: nn.Module = fsdp.wrap(module, accelerator)
        self.state = TrainState(settings, module)
        found = self._broadcast_latest_checkpoint()
        last = directories.channel("previous_state")
        if found is not None:
            self.state.restore(found)
        elif last.is_dir():
            self.state.load_from_stage(last, settings.stage)
        self.resumed_from = self.state.step
        self.model_inputs = ModelInputs(parts, self.device, settings.training.caption_dropout)
        if accelerator.num_processes > 1 and not fsdp.is_sharded(module):
            self._warm_up_ddp_buckets()
        self.loader = Loader(
            catalogue,
            seat,
            settings.data,
            resolution=settings.stage.resolution,
            batch_size=settings.stage.per_device_batch_size,
            seed=settings.training.seed,
            decode_workers=settings.training.decode_workers,
            state=None if found is None else (found.folder / SAMPLER_FILE).read_bytes(),
            rng=parts.draws(settings.training.seed),
            tokenize=parts.text.tokenize,
            pin_memory=self.device.type == "cuda",
        )
        self.metrics = MetricsLogger(settings, accelerator, events, self.loader)
        self.evaluator = Evaluator(
            settings, parts, self.state, accelerator, directories, events, held_out
        )
        self._saver = self._make_saver()
        self._rollbacks = 0

    def _make_saver(self) -> AsyncCheckpointer:
        accelerator = self.accelerator
        return AsyncCheckpointer(
            self.paths.checkpoints,
            CheckpointRank(
                accelerator.process_index,
                accelerator.num_processes,
                accelerator.is_local_main_process,
            ),
            fingerprint=self.state.fingerprint,
            keep=self.config.checkpoint.keep_last,
            events=self.events,
            gather=gather_object,
            beside=self.state.background,
        )

    def _warm_up_ddp_buckets(self) -> None:
        """Two backward passes of zeros.

        DDP orders gradients anew after the first, of a static graph with the second, and a sum over
        three or more processes depends on their order in its last bit: without this, a resumed
        run's first step would differ. FSDP2 has one order.
        """
        config = self.components.network.config
        side = config.sample_size
        images = torch.zeros(1, config.in_channels, side, side, device=self.device)
        task = self.components.objective.task(images, images, np.array([0.5]))
        with self.accelerator.autocast():
            text = self.model_inputs.no_text()
        for _ in range(2):
            with self.accelerator.autocast():
                nothing = self.model(task.noisy, task.timesteps, *text).float().sum() * 0.0
            self.accelerator.backward(nothing)
            self.state.zero_grad()

    # ------------------------------------------------------------------ training

    def run(self, pulse: HeartbeatWriter, stop: StopSignal) -> TrainResult:
        """Train to the stage's last step, or to a stop that somebody asked for."""
        stage, training, learner = self.config.stage, self.config.training, self.state
        interval = StepMetricsWindow(self.device)
        batches = iter(self.loader)
        speed, next_check = 0.0, learner.step
        started, first = time.monotonic(), learner.step
        reason = "done"
        while learner.step < stage.max_steps and reason == "done":
            self._train_step(batches, interval, pulse)
            checking = learner.step >= next_check
            if checking and self._share_status(stop, pulse) and learner.step < stage.max_steps:
                reason = "sigterm"
            last = reason == "sigterm" or learner.step == stage.max_steps
            saving = last or learner.step % self.config.checkpoint.every_steps == 0
            evaluating = self.evaluator.due(learner.step) and reason == "done"
            if saving or evaluating or learner.step % training.log_every == 0:
                speed = self.metrics.log_steps(learner.step, interval, learner.learning_rate)
                interval = StepMetricsWindow(self.device)
                if self.metrics.consecutive_skips > training.max_nonfinite_steps:
                    pulse.enter(Phase.START, learner.step)
                    self._roll_back()
                    next_check = learner.step
                    continue
            # What led to steps without a gradient may be in the weights already.
            if saving and (last or not self.metrics.consecutive_skips):
                pulse.enter(Phase.CHECKPOINT, learner.step)
                self._begin_checkpoint()
            if evaluating:
                self.evaluator.run(stop, partial(pulse.enter, step=learner.step))
                interval = StepMetricsWindow(self.device)
                # It may have been cut short by a stop.
                next_check = learner.step
            if checking or saving:
                patience = STOP_CHECK_SECONDS if self._saver.step is None else WRITTEN_CHECK_SECONDS
                # From a figure that all processes share, so that they ask after the same step.
                next_check = learner.step + max(1, int(patience * speed))
        pulse.enter(Phase.FINISH, learner.step)
        self._finish_checkpoint()
        return TrainResult(reason, learner.step - first, time.monotonic() - started)

    def _train_step(
        self, batches: Iterator[Batch], interval: StepMetricsWindow, pulse: HeartbeatWriter
    ) -> None:
        """One optimizer step over ``gradient_accumulation_steps`` micro-batches."""
        gradient_accumulation_steps, learner = (
            self.config.stage.gradient_accumulation_steps,
            self.state,
        )
        losses: list[Tensor] = []
        origins: list[SampleId] = []
        for micro in range(gradient_accumulation_steps):
            waiting = time.perf_counter()
            pulse.enter(Phase.DATA, learner.step)
            batch = next(batches)
            pulse.enter(Phase.STEP, learner.step)
            interval.data_wait_seconds += time.perf_counter() - waiting
            self.metrics.bad.add(batch)
            origins += batch.origins
            self.metrics.log_epoch()
            last = micro == gradient_accumulation_steps - 1
            with nullcontext() if last else self._accumulating():
                with self._autocast():
                    task, text = self.model_inputs.prepare(batch)
                    prediction = self.model(task.noisy, task.timesteps, *text)
                    value = loss(prediction, task) / gradient_accumulation_steps
                learner.start_ema_update()
                self.accelerator.backward(value)
            losses.append(value.detach())
        norm = fsdp.gradient_norm(learner.parameters)
        # The sum of gradients is the same on all processes, so all leave out the same steps.
        skipped = learner.update(norm)
        interval.add(learner.step, losses, norm, skipped, origins)

    def _accumulating(self) -> AbstractContextManager[None]:
        """Gradients are summed over processes once a step, with the last micro-batch."""
        return fsdp.no_sync(
            self.model,
            self.accelerator,
            unsharded_grads=self.plan.unsharded_grad_accumulation,
            unsharded_weights=self.plan.sharding == "shard_grad_op",
        )

    def _share_status(self, stop: StopSignal, pulse: HeartbeatWriter) -> bool:
        """Whether any process was asked to stop; concludes a checkpoint that all have written."""
        status = torch.tensor(
            [float(stop.requested), float(self._saver.writing)], device=self.device
        )
        asked, writing = self.accelerator.reduce(status, "sum").tolist()
        if self._saver.step is not None and not writing:
            pulse.enter(Phase.CHECKPOINT, self.state.step)
            self._saver.commit()
        return bool(asked)

    def log_end(self, ended: TrainResult) -> None:
        """Write the ``end`` event: everything that the job leaves behind is there."""
        self.events.write(
            "end",
            f"ended at step {self.state.step}: {ended.reason}",
            step=self.state.step,
            reason=ended.reason,
            training_seconds=ended.seconds,
            images=ended.steps * self.metrics.effective_batch_size,
            steps_per_second=ended.steps / ended.seconds if ended.steps else None,
        )

    def final_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Of what is trained, averaged where an average is kept; all processes must go through."""
        self.state.copy_ema_to_weights()
        for name, tensor in self.state.module.state_dict().items():
            yield name, full_tensor(tensor)

    # ------------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self) -> None:
        """Begin to save this step; the one before is finished first."""
        self._finish_checkpoint()
        files: dict[str, Callable[[Path], None]] = {}
        if self.accelerator.is_main_process:
            files = self.state.shared_files()
            files[SAMPLER_FILE] = manifest.save_bytes(self.loader.state_bytes())
        self._saver.save_async(self.state.step, self.state.tensors(), files)

    def _finish_checkpoint(self) -> None:
        if self._saver.step is not None:
            self._saver.wait()
            self._saver.commit()

    def _roll_back(self) -> None:
        """Back to the newest checkpoint; the data go on, so that other samples come.

        Raises:
            DivergedError: there is none, or that was tried often enough.
        """
        self._finish_checkpoint()
        left, skipped = self.state.step, self.metrics.consecutive_skips
        allowed = self._rollbacks < self.config.training.max_rollbacks
        found = self._broadcast_latest_checkpoint() if allowed else None
        if found is None:
            where = gather_object(
                [self.metrics.last_nonfinite_loss] if self.metrics.last_nonfinite_loss else []
            )
            raise DivergedError(
                f"{skipped} steps in a row had no finite gradient, up to step {left}"
                f"{'; non-finite loss in ' + '; '.join(where[:MAX_NAMED_SAMPLES]) if where else ''}"
                "; lower the learning rate or lengthen the warm-up; earlier checkpoints are intact"
            )
        self.state.restore(found)
        self._rollbacks += 1
        self.metrics.consecutive_skips = 0
        if self.accelerator.is_main_process:
            self.events.warn(
                "rolled-back",
                f"{skipped} steps in a row had no finite gradient: from step {left} back to the "
                f"checkpoint of step {found.step}, with the data that come next",
                step=found.step,
            )

    def _broadcast_latest_checkpoint(self) -> manifest.CheckpointInfo | None:
        """The first process chooses and checks, so that all resume from the same one."""

        def passed_over(folder: Path, reason: str) -> None:
            self.events.warn("checkpoint-skipped", f"{folder.name} is passed over: {reason}")

        choice: list[Any] = [None]
        if self.accelerator.is_main_process:
            choice[0] = manifest.latest_complete(self.paths.checkpoints, passed_over)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(choice)
        found: manifest.CheckpointInfo | None = choice[0]
        if found is None:
            return None
        # Each instance has its own copy of the shared prefix, below its own path.
        here = self.paths.checkpoints / found.folder.name
        return manifest.CheckpointInfo(here, found.step, found.world_size, found.fingerprint)


class DivergedError(RuntimeError):
    """Training on would only burn money; the message is one line."""


@dataclass(frozen=True)
class TrainResult:
    """How training ended: ``done`` or ``sigterm``, after ``steps`` of this process's own."""

    reason: str
    steps: int
    seconds: float
