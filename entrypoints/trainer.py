"""The training loop of one stage: steps, checkpoints, and an end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from sm_train.entrypoints import checkpoint as store
from sm_train.entrypoints.batches import Batch
from sm_train.entrypoints.catalogue import Catalogue, Seat
from sm_train.entrypoints.diffusion import loss
from sm_train.entrypoints.directories import Directories
from sm_train.entrypoints.events import Events
from sm_train.entrypoints.heartbeat import Heartbeat
from sm_train.entrypoints.inputs import Inputs
from sm_train.entrypoints.interval import Interval, Origin
from sm_train.entrypoints.learner import Learner
from sm_train.entrypoints.loader import Loader
from sm_train.entrypoints.models import Parts, longest_caption
from sm_train.entrypoints.saver import Place, Saver
from sm_train.entrypoints.settings import Settings
from sm_train.entrypoints.step_log import NAMED, StepLog
from sm_train.entrypoints.stop import StopRequest
from torch import Tensor, nn

STOP_CHECK_SECONDS = 5.0
"""How long a SIGTERM may wait until all processes agree to stop, which takes a collective.

SageMaker kills after 120 seconds, torchrun after 30 of its own.
"""

WRITTEN_CHECK_SECONDS = 1.0
"""How often processes ask each other, in the same way, whether a checkpoint is written."""

RECORD = "data.npz"
"""The file of a checkpoint that says where the run is in its data."""


class Trainer:
    """Trains one stage from where its newest checkpoint left off.

    ``model`` is what the learner trains, wrapped for all processes.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        accelerator: Accelerator,
        directories: Directories,
        events: Events,
        catalogue: Catalogue,
        seat: Seat,
    ) -> None:
        self.settings, self.parts, self.accelerator = settings, parts, accelerator
        self.directories, self.events = directories, events
        self.device: torch.device = accelerator.device
        for module in parts.frozen():
            module.to(self.device)
        self.learner = Learner(settings, parts, self.device, accelerator.process_index)
        found = self._agree_on_checkpoint()
        if found is not None:
            self._resume(found)
        self.resumed_from = self.learner.step
        self.model: nn.Module = accelerator.prepare_model(self.learner.module)
        if accelerator.num_processes > 1:
            self._settle_gradient_order()
        self.inputs = Inputs(
            parts, self.device, self.learner.generator, settings.training.caption_dropout
        )
        self.loader = Loader(
            catalogue,
            seat,
            settings.data,
            resolution=settings.stage.resolution,
            batch_size=settings.stage.per_gpu_batch,
            seed=settings.training.seed,
            workers=settings.training.workers,
            record=None if found is None else (found.folder / RECORD).read_bytes(),
            pin_memory=self.device.type == "cuda",
        )
        self.log = StepLog(settings, accelerator, events, self.loader)
        self._saver = self._make_saver()
        self._rollbacks = 0

    def _make_saver(self) -> Saver:
        accelerator = self.accelerator
        return Saver(
            self.directories.checkpoints,
            Place(
                accelerator.process_index,
                accelerator.num_processes,
                accelerator.is_local_main_process,
            ),
            fingerprint=self.learner.fingerprint,
            keep=self.settings.checkpoint.keep,
            events=self.events,
            gather=gather_object,
        )

    def _settle_gradient_order(self) -> None:
        """One backward pass of zeros.

        DDP orders gradients anew after the first, and a sum over three or more processes depends
        on their order in its last bit: without this, a resumed run's first step would differ.
        """
        unet: Any = self.parts.unet
        side, channels = unet.config.sample_size, unet.config.in_channels
        length = longest_caption(self.parts.text_encoder, self.parts.tokenizer)
        shape: tuple[int, ...] = (1, length)
        if not self.parts.train_text_encoder:
            shape += (unet.config.cross_attention_dim,)
        captions = torch.zeros(
            shape, device=self.device, dtype=torch.long if len(shape) == 2 else torch.float
        )
        images = torch.zeros(1, channels, side, side, device=self.device)
        timesteps = torch.zeros(1, dtype=torch.long, device=self.device)
        with self.accelerator.autocast():
            nothing = self.model(images, timesteps, captions).float().sum() * 0.0
        self.accelerator.backward(nothing)
        self.learner.forget_gradients()

    # ------------------------------------------------------------------ training

    def run(self, heartbeat: Heartbeat, stop: StopRequest) -> Ended:
        """Train to the stage's last step, or to a stop that somebody asked for."""
        stage, training, learner = self.settings.stage, self.settings.training, self.learner
        interval = Interval(self.device)
        batches = iter(self.loader)
        speed, next_check = 0.0, learner.step
        started, first = time.monotonic(), learner.step
        reason = "done"
        while learner.step < stage.iterations and reason == "done":
            self._train_step(batches, interval)
            heartbeat.beat(learner.step)
            checking = learner.step >= next_check
            if checking and self._share_status(stop) and learner.step < stage.iterations:
                reason = "sigterm"
            last = reason == "sigterm" or learner.step == stage.iterations
            saving = last or learner.step % self.settings.checkpoint.every == 0
            if saving or learner.step % training.log_every == 0:
                speed = self.log.tell_steps(learner.step, interval, learner.learning_rate)
                interval = Interval(self.device)
                if self.log.skipped_in_a_row > training.max_skipped_steps:
                    self._roll_back()
                    next_check = learner.step
                    continue
            # What led to steps without a gradient may be in the weights already.
            if saving and (last or not self.log.skipped_in_a_row):
                self._begin_checkpoint()
            if checking or saving:
                patience = STOP_CHECK_SECONDS if self._saver.step is None else WRITTEN_CHECK_SECONDS
                # From a figure that all processes share, so that they ask after the same step.
                next_check = learner.step + max(1, int(patience * speed))
        self._finish_checkpoint()
        return Ended(reason, learner.step - first, time.monotonic() - started)

    def _train_step(self, batches: Iterator[Batch], interval: Interval) -> None:
        """One optimizer step over ``accumulation`` micro-batches."""
        accumulation, learner = self.settings.stage.accumulation, self.learner
        total = torch.zeros((), device=self.device)
        origins: list[Origin] = []
        for micro in range(accumulation):
            waiting = time.perf_counter()
            batch = next(batches)
            interval.waited += time.perf_counter() - waiting
            self.log.bad.add(batch)
            origins += batch.origins
            self.log.tell_epoch()
            images, captions = self._prepare(batch, micro)
            # Gradients are summed over processes once a step, with the last micro-batch.
            last = micro == accumulation - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    value = loss(
                        self.model, self.parts.scheduler, images, captions, learner.generator
                    )
                self.accelerator.backward(value / accumulation)
            total += value.detach() / accumulation
        norm = nn.utils.clip_grad_norm_(learner.parameters, self.settings.training.gradient_clip)
        # The sum of gradients is the same on all processes, so all leave out the same steps.
        skipped = (~torch.isfinite(norm)).float()
        learner.update(skipped)
        interval.add(learner.step, total, norm, skipped, origins)

    def _prepare(self, batch: Batch, micro: int) -> tuple[Tensor, Tensor]:
        seed, process = self.settings.training.seed, self.accelerator.process_index
        key = f"{seed}/{process}/{self.learner.step}/{micro}"
        return self.inputs.prepare(batch, key, self.accelerator.autocast())

    def _share_status(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop; concludes a checkpoint that all have written."""
        status = torch.tensor([float(stop.asked), float(self._saver.writing)], device=self.device)
        asked, writing = self.accelerator.reduce(status, "sum").tolist()
        if self._saver.step is not None and not writing:
            self._saver.conclude()
        return bool(asked)

    def say_end(self, ended: Ended) -> None:
        """Write the ``end`` event: everything that the job leaves behind is there."""
        self.events.write(
            "end",
            f"ended at step {self.learner.step}: {ended.reason}",
            step=self.learner.step,
            reason=ended.reason,
            training_seconds=ended.seconds,
            images=ended.steps * self.log.effective_batch_size,
            iterations_per_second=ended.steps / ended.seconds if ended.steps else None,
        )

    def final_parts(self) -> Parts:
        """The parts with the averaged weights, where an average is kept."""
        self.learner.take_average()
        return self.parts

    # ------------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self) -> None:
        """Begin to save this step; the one before is finished first."""
        self._finish_checkpoint()
        files = self.learner.own_files()
        if self.accelerator.is_main_process:
            files |= self.learner.shared_files()
            files[RECORD] = store.save_bytes(self.loader.record())
        self._saver.begin(self.learner.step, self.learner.tensors(), files)

    def _finish_checkpoint(self) -> None:
        if self._saver.step is not None:
            self._saver.wait()
            self._saver.conclude()

    def _resume(self, found: store.Found) -> None:
        self.learner.restore(found)
        processes = self.accelerator.num_processes
        if self.learner.restore_own(found, processes) and self.accelerator.is_main_process:
            self.events.warn(
                "world-size-changed",
                f"{found.folder.name} was written by {found.world_size} processes and is read by "
                f"{processes}: noise is drawn anew",
            )

    def _roll_back(self) -> None:
        """Back to the newest checkpoint; the data go on, so that other samples come.

        Raises:
            DivergedError: there is none, or that was tried often enough.
        """
        self._finish_checkpoint()
        left, skipped = self.learner.step, self.log.skipped_in_a_row
        allowed = self._rollbacks < self.settings.training.max_rollbacks
        found = self._agree_on_checkpoint() if allowed else None
        if found is None:
            where = gather_object([self.log.spoilt] if self.log.spoilt else [])
            raise DivergedError(
                f"{skipped} steps in a row had no finite gradient, up to step {left}"
                f"{'; the loss was no number in ' + '; '.join(where[:NAMED]) if where else ''}; "
                "lower the learning rate or lengthen the warm-up; checkpoints from before are whole"
            )
        self.learner.restore(found)
        self._rollbacks += 1
        self.log.skipped_in_a_row = 0
        if self.accelerator.is_main_process:
            self.events.warn(
                "rolled-back",
                f"{skipped} steps in a row had no finite gradient: from step {left} back to the "
                f"checkpoint of step {found.step}, with the data that come next",
                step=found.step,
            )

    def _agree_on_checkpoint(self) -> store.Found | None:
        """The first process chooses and checks, so that all resume from the same one."""

        def passed_over(folder: Path, reason: str) -> None:
            self.events.warn("checkpoint-passed-over", f"{folder.name} is passed over: {reason}")

        choice: list[Any] = [None]
        if self.accelerator.is_main_process:
            choice[0] = store.newest_complete(self.directories.checkpoints, passed_over)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(choice)
        found: store.Found | None = choice[0]
        if found is None:
            return None
        # Each instance has its own copy of the shared prefix, below its own path.
        here = self.directories.checkpoints / found.folder.name
        return store.Found(here, found.step, found.world_size, found.fingerprint)


class DivergedError(RuntimeError):
    """Training on would only burn money; the message is one line."""


@dataclass(frozen=True)
class Ended:
    """How training ended: ``done`` or ``sigterm``, after ``steps`` of this process's own."""

    reason: str
    steps: int
    seconds: float
