"""The training loop of one stage: steps, their events, checkpoints, and an end."""

from __future__ import annotations

import math
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
from sm_train.entrypoints.loader import Loader
from sm_train.entrypoints.models import Parts, longest_caption
from sm_train.entrypoints.settings import Settings
from sm_train.entrypoints.stop import StopRequest
from torch import Tensor, nn

STOP_CHECK_SECONDS = 5.0
"""How long a SIGTERM may wait until all processes agree to stop, which takes a collective.

SageMaker kills after 120 seconds, torchrun after 30 of its own.
"""


RECORD = "data.npz"
"""The file of a checkpoint that says where the run is in its data."""


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
        self._epoch_told: int | None = None

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
        decay = self.settings.training.ema_decay
        return ExponentialMovingAverage(self.parameters, decay) if decay else None

    # ------------------------------------------------------------------ training

    def run(self, heartbeat: Heartbeat, stop: StopRequest) -> Ended:
        """Train to the stage's last step, or to a stop that somebody asked for."""
        stage, training = self.settings.stage, self.settings.training
        interval = _Interval(self.device)
        batches = iter(self.loader)
        speed, next_check = 0.0, self.step
        started, first = time.monotonic(), self.step
        while self.step < stage.iterations:
            self._train_step(batches, interval)
            heartbeat.beat(self.step)
            last = self.step == stage.iterations
            checking = self.step >= next_check
            stopping = checking and self._all_asked(stop)
            saving = stopping or last or self.step % self.settings.checkpoint.every == 0
            if saving or self.step % training.log_every == 0:
                # Before every checkpoint too: weights that are lost are not saved.
                speed = self._log(interval)
                interval = _Interval(self.device)
            if checking:
                # From a figure that all processes share, so that they ask after the same step.
                next_check = self.step + max(1, int(STOP_CHECK_SECONDS * speed))
            if saving:
                self.save()
                heartbeat.beat(self.step)
            if stopping and not last:
                return Ended("sigterm", self.step - first, time.monotonic() - started)
        return Ended("done", self.step - first, time.monotonic() - started)

    def _train_step(self, batches: Iterator[Batch], interval: _Interval) -> None:
        """One optimizer step over ``accumulation`` micro-batches."""
        accumulation = self.settings.stage.accumulation
        total = torch.zeros((), device=self.device)
        for micro in range(accumulation):
            waiting = time.perf_counter()
            batch = next(batches)
            interval.waited += time.perf_counter() - waiting
            self.bad.add(batch)
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
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.parameters)
        self.step += 1
        interval.add(total, norm)

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

    def _log(self, interval: _Interval) -> float:
        """Write the interval's ``step`` event; returns its it/s, the same on all processes.

        Every process tells of its own bad samples.

        Raises:
            DivergedError: the loss or the gradient is not a number any more.
        """
        if (skipped := self.bad.report()) is not None:
            message, reasons = skipped
            self._warn("bad-sample", message, reasons=reasons, samples=self.bad.seen)
        seconds = time.monotonic() - interval.started
        means = torch.stack(
            [
                interval.loss / interval.steps,
                interval.norm / interval.steps,
                torch.tensor(seconds, device=self.device),
                torch.tensor(interval.waited / seconds, device=self.device),
            ]
        )
        mean_loss, norm, seconds, wait = self.accelerator.reduce(means, "mean").tolist()
        speed = interval.steps / seconds
        if self.accelerator.is_main_process:
            self.events.write(
                "step",
                f"step {self.step}/{self.settings.stage.iterations}  "
                f"loss {mean_loss:.4f}  {speed:.2f} it/s",
                step=self.step,
                epoch=self.loader.epoch,
                loss=mean_loss,
                learning_rate=self.schedule.get_last_lr()[0],
                gradient_norm=norm,
                iterations_per_second=speed,
                images_per_second=speed * self.effective_batch_size,
                data_wait_share=wait,
            )
        if not math.isfinite(mean_loss + norm):
            raise DivergedError(
                f"the loss is {mean_loss} and the gradient's norm {norm} before step "
                f"{self.step + 1}; lower the learning rate or lengthen the warm-up; checkpoints "
                "from before are whole"
            )
        return float(speed)

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

    def _all_asked(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop, told to all of them."""
        return bool(self.accelerator.reduce(stop.flag(self.device), "sum").item())

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write a complete checkpoint of this step, every process its own part."""
        started = time.monotonic()
        folder = store.step_folder(self.directories.checkpoints, self.step)
        folder.mkdir(parents=True, exist_ok=True)
        rank = self.accelerator.process_index
        own = {
            "generator": self.generator.get_state(),
            "cpu_rng": torch.get_rng_state(),
        }
        if self.accelerator.is_main_process:
            # An attempt before this one may have left a folder, damaged since, of this step.
            store.unmark(folder)
        files = [store.write_file(folder, f"rank-{rank:05d}.pt", store.save_object(own))]
        if self.accelerator.is_main_process:
            files += self._write_shared(folder)
        # gather_object waits for all: nobody's file is missing when the marker is written.
        everyones: list[store.File] = gather_object(files)
        if self.accelerator.is_main_process:
            world_size = self.accelerator.num_processes
            store.write_marker(folder, self.step, world_size, self.fingerprint, everyones)
            store.keep_newest(self.directories.checkpoints, self.settings.checkpoint.keep)
            seconds = time.monotonic() - started
            self.events.write(
                "checkpoint",
                f"checkpoint at step {self.step} in {seconds:.1f} s",
                step=self.step,
                path=str(folder),
                bytes=sum(file.bytes for file in everyones),
                seconds=seconds,
            )
        self.accelerator.wait_for_everyone()

    def _write_shared(self, folder: Path) -> list[store.File]:
        state = {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "ema_updates": self.ema.updates if self.ema else 0,
        }
        files = [
            store.write_file(
                folder, "model.safetensors", store.save_tensors(self.module.state_dict())
            ),
            store.write_file(folder, "optimizer.pt", store.save_object(state)),
            store.write_file(folder, RECORD, store.save_bytes(self.loader.record())),
        ]
        if self.ema is not None:
            averages = store.save_tensors(self._average_by_name())
            files.append(store.write_file(folder, "ema.safetensors", averages))
        return files

    def _average_by_name(self) -> dict[str, Tensor]:
        assert self.ema is not None
        names = [name for name, one in self.module.named_parameters() if one.requires_grad]
        return dict(zip(names, self.ema.averages, strict=True))

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
        self.module.load_state_dict(store.load_tensors(found.folder / "model.safetensors"))
        state = store.load_object(found.folder / "optimizer.pt")
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.ema is not None and (found.folder / "ema.safetensors").exists():
            averages = store.load_tensors(found.folder / "ema.safetensors")
            for name, average in self._average_by_name().items():
                average.copy_(averages[name])
            self.ema.updates = state["ema_updates"]
        self.step = found.step
        self._resume_own(found)
        return (found.folder / RECORD).read_bytes()

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


class _Interval:
    """What is summed between two ``step`` events, on the device: nothing is read until then."""

    def __init__(self, device: torch.device) -> None:
        self.started = time.monotonic()
        self.waited = 0.0
        self.steps = 0
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)

    def add(self, loss: Tensor, norm: Tensor) -> None:
        self.steps += 1
        self.loss += loss
        self.norm += norm
