"""The training loop of one stage: steps, their events, checkpoints, and an end."""

from __future__ import annotations

import json
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
from sm_train.entrypoints.bad_samples import BadSamples
from sm_train.entrypoints.batches import Batch
from sm_train.entrypoints.catalogue import Catalogue, Seat
from sm_train.entrypoints.diffusion import loss
from sm_train.entrypoints.directories import Directories
from sm_train.entrypoints.ema import ExponentialMovingAverage
from sm_train.entrypoints.events import Events
from sm_train.entrypoints.heartbeat import Heartbeat
from sm_train.entrypoints.inputs import Inputs
from sm_train.entrypoints.interval import Interval, Origin
from sm_train.entrypoints.loader import Loader
from sm_train.entrypoints.models import Parts, longest_caption
from sm_train.entrypoints.saver import Place, Saver
from sm_train.entrypoints.settings import Settings
from sm_train.entrypoints.stop import StopRequest
from sm_train.entrypoints.tensor_pieces import PiecesError
from sm_train.entrypoints.training_state import TrainingState
from sm_train.entrypoints.utilization import utilization
from torch import Tensor, nn

STOP_CHECK_SECONDS = 5.0
"""How long a SIGTERM may wait until all processes agree to stop, which takes a collective.

SageMaker kills after 120 seconds, torchrun after 30 of its own.
"""

WRITTEN_CHECK_SECONDS = 1.0
"""How often processes ask each other, in the same way, whether a checkpoint is written."""


_NAMED = 5  # steps or places in one message, at most

RECORD, PROGRESS = "data.npz", "progress.json"
"""The files of a checkpoint that say where the run is in its data, and in its schedules."""


class Trainer:
    """Trains one stage from where its newest checkpoint left off.

    ``module`` is what learns, unwrapped; ``model`` is the same, wrapped for all processes.
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
        self.module = parts.trained().to(self.device)
        self.parameters = [one for one in self.module.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.stage.learning_rate,
            weight_decay=settings.training.weight_decay,
            fused=_fused_available(self.device),
        )
        warmup = settings.training.warmup_iterations
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1))
        )
        self.generator = torch.Generator(self.device)
        # A seed for each process: they must not draw the same noise.
        self.generator.manual_seed(settings.training.seed * 65537 + accelerator.process_index)
        self.step = 0
        self.fingerprint = store.fingerprint(self.module.state_dict())
        self.ema = self._new_average()
        self.optimizer, self.schedule = optimizer, schedule
        self.state = TrainingState(self.module, optimizer, self.ema)
        self.saver = Saver(
            directories.checkpoints,
            Place(
                accelerator.process_index,
                accelerator.num_processes,
                accelerator.is_local_main_process,
            ),
            fingerprint=self.fingerprint,
            keep=settings.checkpoint.keep,
            events=events,
            gather=gather_object,
        )
        record = self._resume()
        self.resumed_from = self.step
        self.model: nn.Module = accelerator.prepare_model(self.module)
        if accelerator.num_processes > 1:
            self._settle_gradient_order()
        self.inputs = Inputs(parts, self.device, self.generator, settings.training.caption_dropout)
        self.loader = Loader(
            catalogue,
            seat,
            settings.data,
            resolution=settings.stage.resolution,
            batch_size=settings.stage.per_gpu_batch,
            seed=settings.training.seed,
            workers=settings.training.workers,
            record=record,
            pin_memory=self.device.type == "cuda",
        )
        self.bad = BadSamples(settings.data.max_bad_share)
        self.utilization = utilization(settings, self.device)
        self._epoch_told: int | None = None
        self.skipped_in_a_row = self.rollbacks = 0
        self.spoilt = ""

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
        self.optimizer.zero_grad(set_to_none=True)

    def _new_average(self) -> ExponentialMovingAverage | None:
        training = self.settings.training
        if not training.ema_decay:
            return None
        return ExponentialMovingAverage(self.parameters, training.ema_decay, training.ema_start)

    # ------------------------------------------------------------------ training

    def run(self, heartbeat: Heartbeat, stop: StopRequest) -> Ended:
        """Train to the stage's last step, or to a stop that somebody asked for."""
        stage, training = self.settings.stage, self.settings.training
        interval = Interval(self.device)
        batches = iter(self.loader)
        speed, next_check = 0.0, self.step
        started, first = time.monotonic(), self.step
        reason = "done"
        while self.step < stage.iterations and reason == "done":
            self._train_step(batches, interval)
            heartbeat.beat(self.step)
            checking = self.step >= next_check
            if checking and self._share_status(stop) and self.step < stage.iterations:
                reason = "sigterm"
            last = reason == "sigterm" or self.step == stage.iterations
            saving = last or self.step % self.settings.checkpoint.every == 0
            if saving or self.step % training.log_every == 0:
                # Before every checkpoint too: weights that are lost are not saved.
                speed = self._log(interval)
                interval = Interval(self.device)
                if self.skipped_in_a_row > training.max_skipped_steps:
                    self._roll_back()
                    continue
            if saving and (last or not self.skipped_in_a_row):
                self._begin_checkpoint()
            if checking or saving:
                patience = STOP_CHECK_SECONDS if self.saver.step is None else WRITTEN_CHECK_SECONDS
                # From a figure that all processes share, so that they ask after the same step.
                next_check = self.step + max(1, int(patience * speed))
        self._finish_checkpoint()
        return Ended(reason, self.step - first, time.monotonic() - started)

    def _train_step(self, batches: Iterator[Batch], interval: Interval) -> None:
        """One optimizer step over ``accumulation`` micro-batches."""
        accumulation = self.settings.stage.accumulation
        total = torch.zeros((), device=self.device)
        origins: list[Origin] = []
        for micro in range(accumulation):
            waiting = time.perf_counter()
            batch = next(batches)
            interval.waited += time.perf_counter() - waiting
            self.bad.add(batch)
            origins += batch.origins
            self._tell_epoch()
            images, captions = self._prepare(batch, micro)
            # Gradients are summed over processes once a step, with the last micro-batch.
            last = micro == accumulation - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    value = loss(self.model, self.parts.scheduler, images, captions, self.generator)
                self.accelerator.backward(value / accumulation)
            total += value.detach() / accumulation
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.training.gradient_clip)
        skipped = (~torch.isfinite(norm)).float()
        self._update(skipped)
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.parameters)
        self.step += 1
        interval.add(self.step, total, norm, skipped, origins)

    def _update(self, skipped: Tensor) -> None:
        """One step of the optimizer, unless ``skipped`` is 1.0: the gradient is no number.

        Fused AdamW looks itself, so that the host need not wait for the device to know. The sum
        of gradients is the same on all processes, so all skip the same steps.
        """
        if self.optimizer.defaults["fused"]:
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skipped.item():
            self.optimizer.step()

    def _prepare(self, batch: Batch, micro: int) -> tuple[Tensor, Tensor]:
        key = f"{self.settings.training.seed}/{self.accelerator.process_index}/{self.step}/{micro}"
        return self.inputs.prepare(batch, key, self.accelerator.autocast())

    # ------------------------------------------------------------------ events

    @property
    def effective_batch_size(self) -> int:
        """Images of one optimizer step over all processes that really run."""
        stage = self.settings.stage
        processes: int = self.accelerator.num_processes
        return stage.per_gpu_batch * stage.accumulation * processes

    def _tell_epoch(self) -> None:
        """Say once an epoch how it comes out: what is read, repeated or out of sight."""
        epoch = self.loader.epoch
        if epoch == self._epoch_told or not self.accelerator.is_main_process:
            return
        self._epoch_told = epoch
        balance = self.loader.balance()
        self.events.write(
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

    def _log(self, interval: Interval) -> float:
        """Write the interval's ``step`` event; returns its it/s, the same on all processes.

        Every process tells of its own bad samples.
        """
        if (skipped := self.bad.report()) is not None:
            message, reasons = skipped
            self._warn("bad-sample", message, reasons=reasons, samples=self.bad.seen)
        means = interval.means(self.accelerator.reduce(interval.sums(), "mean").tolist())
        speed = len(interval) / means.seconds
        images = speed * self.effective_batch_size
        gpus: int = self.accelerator.num_processes
        mfu = self.utilization.share(images, gpus) if self.utilization else None
        if self.accelerator.is_main_process:
            self.events.write(
                "step",
                f"step {self.step}/{self.settings.stage.iterations}  "
                f"loss {means.loss:.4f}  {speed:.2f} it/s{f'  MFU {mfu:.0%}' if mfu else ''}",
                step=self.step,
                epoch=self.loader.epoch,
                loss=means.loss,
                learning_rate=self.schedule.get_last_lr()[0],
                gradient_norm=means.gradient_norm,
                iterations_per_second=speed,
                images_per_second=images,
                data_wait_share=means.waited_share,
                mfu=mfu,
            )
        self.skipped_in_a_row = self.skipped_in_a_row + means.skipped if means.skipped else 0
        if means.skipped:
            self._tell_skipped(interval)
        return float(speed)

    def _tell_skipped(self, interval: Interval) -> None:
        """Which steps were left out; every process names the samples of its own bad losses."""
        if self.accelerator.is_main_process:
            steps = interval.skipped_steps()
            shown = ", ".join(map(str, steps[:_NAMED])) + (", …" if len(steps) > _NAMED else "")
            self._warn(
                "step-skipped",
                f"{len(steps)} steps had no finite gradient and were left out: {shown}",
                steps=steps,
            )
        for step, origins in interval.spoilt()[:_NAMED]:
            names = self.loader.names(origins)
            self.spoilt = f"step {step}: {', '.join(names)}"
            self._warn(
                "loss-not-finite", f"the loss was no number in {self.spoilt}", step=step,
                samples=names,
            )  # fmt: skip

    def _roll_back(self) -> None:
        """Back to the newest checkpoint; the data go on, so that other samples come.

        Raises:
            DivergedError: there is none, or that was tried often enough.
        """
        self._finish_checkpoint()
        steps, limit = self.skipped_in_a_row, self.settings.training.max_rollbacks
        found = self._agree_on_checkpoint() if self.rollbacks < limit else None
        if found is None:
            where = gather_object([self.spoilt] if self.spoilt else [])
            raise DivergedError(
                f"{steps} steps in a row had no finite gradient, up to step {self.step}"
                f"{'; the loss was no number in ' + '; '.join(where[:_NAMED]) if where else ''}; "
                "lower the learning rate or lengthen the warm-up; checkpoints from before are whole"
            )
        self.rollbacks += 1
        self.skipped_in_a_row = 0
        left = self.step
        self._restore(found)
        if self.accelerator.is_main_process:
            self._warn(
                "rolled-back",
                f"{steps} steps in a row had no finite gradient: from step {left} back to the "
                f"checkpoint of step {found.step}, with the data that come next",
                step=found.step,
            )

    def say_end(self, ended: Ended) -> None:
        """Write the ``end`` event: everything that the job leaves behind is there."""
        self.events.write(
            "end",
            f"ended at step {self.step}: {ended.reason}",
            step=self.step,
            reason=ended.reason,
            training_seconds=ended.seconds,
            images=ended.steps * self.effective_batch_size,
            iterations_per_second=ended.steps / ended.seconds if ended.steps else None,
        )

    def _warn(self, code: str, message: str, **fields: Any) -> None:
        self.events.write("warning", f"warning: {message}", code=code, message=message, **fields)

    def _share_status(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop; concludes a checkpoint that all have written."""
        status = torch.tensor([float(stop.asked), float(self.saver.writing)], device=self.device)
        asked, writing = self.accelerator.reduce(status, "sum").tolist()
        if self.saver.step is not None and not writing:
            self.saver.conclude()
        return bool(asked)

    # ------------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self) -> None:
        """Begin to save this step; the one before is finished first."""
        self._finish_checkpoint()
        own = {"generator": self.generator.get_state(), "cpu_rng": torch.get_rng_state()}
        files = {f"rank-{self.accelerator.process_index:05d}.pt": store.save_object(own)}
        if self.accelerator.is_main_process:
            progress = {
                "schedule": self.schedule.last_epoch,
                "ema_updates": self.ema.updates if self.ema else 0,
            }
            files[PROGRESS] = store.save_bytes(json.dumps(progress).encode())
            files[RECORD] = store.save_bytes(self.loader.record())
        self.saver.begin(self.step, self.state.tensors(), files)

    def _finish_checkpoint(self) -> None:
        if self.saver.step is not None:
            self.saver.wait()
            self.saver.conclude()

    def _resume(self) -> bytes | None:
        """Load the newest complete checkpoint; returns the run's place in its data.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        found = self._agree_on_checkpoint()
        if found is None:
            return None
        if found.fingerprint != self.fingerprint:
            raise store.CheckpointError(
                f"{found.folder}: is of another model (weights {found.fingerprint}, this one has "
                f"{self.fingerprint}); give the run another name or checkpoint folder"
            )
        self._restore(found)
        self._resume_own(found)
        return (found.folder / RECORD).read_bytes()

    def _restore(self, found: store.Found) -> None:
        try:
            self.state.restore(store.pieces_files(found.folder))
        except PiecesError as error:
            raise store.CheckpointError(f"{found.folder}: {error}") from None
        progress = json.loads((found.folder / PROGRESS).read_text(encoding="utf-8"))
        self._restore_schedule(progress["schedule"])
        if self.ema is not None:
            self.ema.updates = progress["ema_updates"]
        self.step = found.step

    def _restore_schedule(self, steps: int) -> None:
        """Go on after ``steps`` of the schedule, with the learning rate that the run file says."""
        rates = [
            rate * factor(steps)
            for rate, factor in zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        ]
        self.schedule.load_state_dict(
            self.schedule.state_dict() | {"last_epoch": steps, "_last_lr": rates}
        )
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _resume_own(self, found: store.Found) -> None:
        """This process's random state; with another number of processes all draw anew."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        if found.world_size == processes:
            own = store.load_object(found.folder / f"rank-{rank:05d}.pt")
            self.generator.set_state(own["generator"])
            torch.set_rng_state(own["cpu_rng"])
            return
        # Not from the same numbers again: those of the first steps have been used.
        self.generator.manual_seed(self.settings.training.seed * 65537 + rank + found.step * 7919)
        if self.accelerator.is_main_process:
            self._warn(
                "world-size-changed",
                f"{found.folder.name} was written by {found.world_size} processes and is read by "
                f"{processes}: noise is drawn anew",
            )

    def _agree_on_checkpoint(self) -> store.Found | None:
        """The first process chooses and checks, so that all resume from the same one."""

        def passed_over(folder: Path, reason: str) -> None:
            self._warn("checkpoint-passed-over", f"{folder.name} is passed over: {reason}")

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

    # ------------------------------------------------------------------ final model

    def final_parts(self) -> Parts:
        """The parts with the averaged weights, where an average is kept."""
        if self.ema is not None:
            with torch.no_grad():
                for parameter, average in zip(self.parameters, self.ema.averages, strict=True):
                    parameter.copy_(average)
        return self.parts


class DivergedError(RuntimeError):
    """Training on would only burn money; the message is one line."""


@dataclass(frozen=True)
class Ended:
    """How training ended: ``done`` or ``sigterm``, after ``steps`` of this process's own."""

    reason: str
    steps: int
    seconds: float


def _fused_available(device: torch.device) -> bool:
    """Whether this PyTorch has the fused AdamW there; before 2.4 it had none for the CPU."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()
