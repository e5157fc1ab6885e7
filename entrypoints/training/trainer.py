"""The training loop of one stage: steps, checkpoints, evaluations, stop and rollback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from sm_train.entrypoints.base.rng import hash64
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.base.signals import StopSignal
from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointInfo
from sm_train.entrypoints.checkpoints.resume_point import remove_later
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.loader import open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog
from sm_train.entrypoints.data_loading.webdataset_reader import ShardStream
from sm_train.entrypoints.distributed import fsdp
from sm_train.entrypoints.distributed.local_shard import full_tensor
from sm_train.entrypoints.job_interface.checkpoint_layout import SAMPLER_FILE
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.lineage.record_log import RecordLog, open_record
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.model_folders import TrainedWeights
from sm_train.entrypoints.models.weight_files import TensorSpec
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase
from sm_train.entrypoints.training.busy_time import (
    BusyTimer,
    GradientOrder,
    attach,
    end_of_first_bucket,
)
from sm_train.entrypoints.training.compilation import without_compilation
from sm_train.entrypoints.training.evaluator import Evaluator, ValidationSet
from sm_train.entrypoints.training.frozen_encoders import place_frozen
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.parallelize import (
    ParallelPlan,
    gpu_memory,
    parallelize,
)
from sm_train.entrypoints.training.state_dict import model_tensors
from sm_train.entrypoints.training.step_metrics import (
    MetricsLogger,
    StepMetricsWindow,
)
from sm_train.entrypoints.training.train_state import TrainState
from sm_train.entrypoints.training.training_checkpoints import TrainingCheckpoints
from sm_train.entrypoints.training.training_loss import TrainingLoss
from torch import Tensor, nn

STOP_CHECK_SECONDS = 5.0
"""Interval at which ranks exchange whether any received SIGTERM, which takes a collective.

SageMaker kills 120 seconds after SIGTERM, torchrun 30 seconds after its SIGTERM.
"""

WRITTEN_CHECK_SECONDS = 1.0
"""The same while a checkpoint is being written: the exchange also reports which ranks are done."""


class Trainer:
    """Trains one stage, from ``checkpoint`` if there is one.

    ``model`` is ``state.module``, wrapped by DDP or sharded.
    """

    def __init__(
        self,
        config: JobConfig,
        components: ModelComponents,
        accelerator: Accelerator,
        paths: SageMakerPaths,
        events: EventLog,
        shards: ShardCatalog | ShardStream,
        data_rank: DataRank,
        validation: ValidationSet | None = None,
        checkpoint: CheckpointInfo | None = None,
    ) -> None:
        self.config, self.components, self.accelerator = config, components, accelerator
        self.paths, self.events = paths, events
        self.plan = ParallelPlan.choose(
            config,
            components.network_init.component,
            accelerator.num_processes,
            data_rank.local_world_size,
            gpu_memory(self.device),
        )
        place_frozen(
            components,
            self.device,
            self.plan.text_encoders,
            text_bf16=self.plan.text_encoder_bf16,
            world_size=accelerator.num_processes,
            per_node=data_rank.local_world_size,
        )
        module = parallelize(self.plan, config, components, accelerator, data_rank.local_world_size)
        # DDP/FSDP wrapping may reallocate parameters, so create the optimizer afterwards.
        self.model: nn.Module = fsdp.wrap(
            module, accelerator, reduce_bf16=config.training.reduce_dtype == "bf16"
        )
        base_digest = components.network_init.base_digest(config.training.seed)
        self.state = TrainState(config, module, base_digest)
        self._loss = TrainingLoss(config.training.objective)
        self.checkpoints = TrainingCheckpoints(
            config, components, accelerator, self.state, paths, events, data_rank
        )
        previous_stage = paths.channel("previous_state")
        if checkpoint is not None:
            self.checkpoints.resume(checkpoint)
        elif previous_stage.is_dir():
            self.state.load_from_stage(previous_stage, config.stage)
        if data_rank.local_rank == 0:
            remove_later(paths.checkpoints, checkpoint.step if checkpoint else None)
        self.resumed_from = self.state.step
        self.model_inputs = ModelInputs(
            components,
            self.device,
            config.training.caption_dropout,
            vae_fp32=components.encodes_in_fp32(config.training),
        )
        self._end_of_first_bucket: Tensor | None = None
        if accelerator.num_processes > 1 and not fsdp.is_sharded(module):
            self._end_of_first_bucket = self._warm_up_ddp_buckets()
        self.loader = open_loader(
            shards,
            data_rank,
            config.data,
            resolution=config.stage.resolution,
            batch_size=config.stage.per_device_batch_size,
            seed=config.training.seed,
            decode_workers=config.training.decode_workers,
            gradient_accumulation_steps=config.stage.gradient_accumulation_steps,
            state=(checkpoint.folder / SAMPLER_FILE).read_bytes() if checkpoint else None,
            rng=replace(
                components.sample_rng(config.training.seed),
                offset_noise=config.training.offset_noise,
            ),
            tokenize=components.text_encoders.tokenize,
            pin_memory=self.device.type == "cuda",
            report=events.warn_of_bad_samples,
            warn=events.warn,
        )
        self.record: RecordLog | None = None
        records = config.checkpoint.save and shards.listed and not config.data.synthetic_samples
        if records:
            writer = None
            if accelerator.is_main_process:
                writer = open_record(
                    paths.checkpoints,
                    config,
                    shards,
                    self.loader,
                    step=self.state.step,
                    accumulation=config.stage.gradient_accumulation_steps,
                )
            self.record = RecordLog(writer, self.loader, events.warn)
        self.metrics = MetricsLogger(config, accelerator, events, self.loader)
        self.evaluator = Evaluator(
            config, components, self.state, accelerator, paths, events, validation
        )

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        device: torch.device = self.accelerator.device
        return device

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: mixed precision, if it is used."""
        # Entering a disabled autocast takes longer than a small batch's arithmetic.
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    def _warm_up_ddp_buckets(self) -> Tensor:
        """Run two backward passes with zero gradients; return the first bucket's last parameter.

        DDP reorders its gradient buckets after the first pass, or the second with a static graph,
        and a sum over three or more ranks depends on the order in its last bit. Without the
        warm-up a resumed run's first step would differ. FSDP2 keeps a single order. Layers that
        compile themselves would do so for this batch of one image as well, for minutes.
        """
        network_config = self.components.network.config
        side = network_config.sample_size
        images = torch.zeros(1, network_config.in_channels, side, side, device=self.device)
        target = self.components.objective.make_target(images, images, np.array([0.5]))
        with self.accelerator.autocast():
            text = self.model_inputs.no_text()
        for _ in range(2):
            order = GradientOrder(self.state.parameters)
            with without_compilation(), self.accelerator.autocast():
                zero = self.model(target.noisy, target.timesteps, *text).float().sum() * 0.0
            self.accelerator.backward(zero)
            order.stop()
            self.state.zero_grad()
        return end_of_first_bucket(order.parameters)

    def _create_busy_timer(self, heartbeat: HeartbeatWriter) -> BusyTimer:
        """Return a timer of this rank's busy time; a single rank waits for no other."""
        timer = BusyTimer(heartbeat.add_busy, self.device)
        if self.accelerator.num_processes > 1:
            attach(timer, self.model, self.state.module, compiled=self.plan.compile)
        if self._end_of_first_bucket is not None:
            self._end_of_first_bucket.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: timer.begin_collectives()
            )
        return timer

    # ------------------------------------------------------------------ training

    def run(self, heartbeat: HeartbeatWriter, stop: StopSignal) -> TrainResult:
        """Train until the stage's last step or a requested stop."""
        stage, training, state = self.config.stage, self.config.training, self.state
        window = StepMetricsWindow(self.device)
        busy = self._create_busy_timer(heartbeat)
        batches = iter(self.loader)
        steps_per_second, next_check = 0.0, state.step
        started, first_step = time.monotonic(), state.step
        reason, withheld = "done", False
        while state.step < stage.max_steps and reason == "done":
            self._train_step(batches, window, heartbeat, busy)
            if self.record is not None:
                self.record.stepped(state.step)
            checking = state.step >= next_check
            if checking:
                stops = self._exchange_status(stop, heartbeat, window)
                reason = "sigterm" if stops and state.step < stage.max_steps else reason
            last = reason == "sigterm" or state.step == stage.max_steps
            due = last or state.step % self.config.checkpoint.every_steps == 0
            saving = (due or withheld) and self.config.checkpoint.save
            evaluating = self.evaluator.due(state.step) and reason == "done"
            if due or evaluating or state.step % training.log_every == 0:
                steps_per_second = self.metrics.log_steps(state.step, window, state.learning_rate)
                window = StepMetricsWindow(self.device)
                self.checkpoints.check_share_of_skipped(self.metrics)
            elif withheld:
                self.metrics.skips.read()
            if self.metrics.skips.consecutive > training.max_nonfinite_steps:
                heartbeat.enter(Phase.START, state.step)
                self.checkpoints.roll_back(self.metrics)
                if self.record is not None:
                    self.record.rolled_back(state.step)
                next_check, withheld = state.step, False
                continue
            # The cause of skipped steps may be in the weights already: save them after the next
            # step with a finite gradient. The last checkpoint is saved regardless, as there will be
            # no better one.
            if saving and not last and self.metrics.skips.consecutive:
                if not withheld:
                    self.metrics.log_withheld(state.step)
                saving, withheld = False, True
            if saving:
                withheld = False
                heartbeat.enter(Phase.CHECKPOINT, state.step)
                with window.checkpoint():
                    if self.record is not None:
                        # Before the checkpoint: what it has seen must be known.
                        self.record.save_replacements(state.step)
                    self.checkpoints.start(self.loader.state_bytes())
                heartbeat.report_failed_saves(self.checkpoints.failures)
            if evaluating:
                self.evaluator.run(stop, partial(heartbeat.enter, step=state.step))
                # The next interval must not include the evaluation's time.
                window = StepMetricsWindow(self.device)
                # A stop may have cut it short: check right after the next step.
                next_check = state.step
            if checking or saving:
                pending = self.checkpoints.is_pending
                interval = WRITTEN_CHECK_SECONDS if pending else STOP_CHECK_SECONDS
                # All ranks share steps_per_second, so they take part after the same step. A save
                # never postpones it: saves may follow each other faster than checks.
                following = state.step + max(1, int(interval * steps_per_second))
                next_check = following if checking else min(next_check, following)
        heartbeat.enter(Phase.FINISH, state.step)
        self.checkpoints.finish()
        heartbeat.report_failed_saves(self.checkpoints.failures)
        if reason == "sigterm":
            self.checkpoints.require_last()
        seconds = time.monotonic() - started
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return TrainResult(reason, state.step - first_step, seconds, peak)

    def _train_step(
        self,
        batches: Iterator[Batch],
        window: StepMetricsWindow,
        heartbeat: HeartbeatWriter,
        busy: BusyTimer,
    ) -> None:
        """Take one optimizer step over ``gradient_accumulation_steps`` micro-batches."""
        micro_batches, state = self.config.stage.gradient_accumulation_steps, self.state
        losses: list[Tensor] = []
        samples: list[str] = []
        busy.begin_step()
        for index in range(micro_batches):
            wait_started = time.perf_counter()
            heartbeat.enter(Phase.DATA, state.step)
            batch = next(batches)
            if self.record is not None:
                self.record.read(batch)
            heartbeat.enter(Phase.STEP, state.step)
            window.data_wait_seconds += time.perf_counter() - wait_started
            samples += batch.names
            self.metrics.log_epoch()
            last = index == micro_batches - 1
            self._seed_dropout(index)
            with nullcontext() if last else self._no_sync():
                with self.autocast():
                    target, text = self.model_inputs.prepare(batch)
                    prediction = self.model(target.noisy, target.timesteps, *text)
                    # DDP and FSDP average gradients over ranks; micro-batches are averaged here.
                    micro_loss = self._loss.mean(prediction, target) / micro_batches
                state.start_ema_update()
                if self._end_of_first_bucket is None:
                    busy.begin_collectives()
                self.accelerator.backward(micro_loss)
            losses.append(micro_loss.detach())
            if not last:
                busy.resume()
        norm = fsdp.gradient_norm(state.parameters)
        busy.resume()
        # The norm is the same on all ranks, so all skip the same steps.
        skipped = state.update(norm)
        busy.end_step()
        self.metrics.skips.add(skipped)
        window.add(state.step, losses, norm, skipped, samples)

    def _seed_dropout(self, micro_batch: int) -> None:
        """Make an adapter's dropout a function of seed, step, micro-batch and rank."""
        lora = self.config.model.lora
        if lora is not None and lora.dropout:
            rank = self.accelerator.process_index
            seed = hash64(self.config.training.seed, self.state.step, micro_batch, rank)
            # PyTorch takes signed seeds.
            torch.manual_seed(int(seed) - 2**63)

    def _no_sync(self) -> AbstractContextManager[None]:
        """Defer the sum of gradients over ranks to the step's last micro-batch."""
        return fsdp.no_sync(
            self.model,
            self.accelerator,
            unsharded_grads=self.plan.unsharded_grad_accumulation,
            unsharded_weights=self.plan.sharding == "shard_grad_op",
        )

    def _exchange_status(
        self, stop: StopSignal, heartbeat: HeartbeatWriter, window: StepMetricsWindow
    ) -> bool:
        """Return whether any rank received a stop; commit a checkpoint that all have written."""
        status = torch.tensor(
            [float(stop.requested), float(self.checkpoints.is_writing)], device=self.device
        )
        stops, writers = self.accelerator.reduce(status, "sum").tolist()
        if self.checkpoints.is_pending and not writers:
            heartbeat.enter(Phase.CHECKPOINT, self.state.step)
            with window.checkpoint():
                self.checkpoints.commit()
            heartbeat.report_failed_saves(self.checkpoints.failures)
        return bool(stops)

    def log_end(self, result: TrainResult) -> None:
        """Log the ``end`` event, after everything that the job leaves has been written."""
        self.events.write(
            "end",
            f"ended at step {self.state.step}: {result.reason}",
            step=self.state.step,
            reason=result.reason,
            training_seconds=result.seconds,
            images=result.steps * self.metrics.effective_batch_size,
            steps_per_second=self.metrics.clock.steps_per_second or result.overall_speed,
            gpu_memory_peak=result.gpu_memory_peak,
        )

    def final_weights(self) -> TrainedWeights:
        """Return the full trained weights, averaged if there is an EMA.

        For a sharded model all ranks must iterate over the tensors to the end: a collective.
        """
        self.state.copy_ema_to_weights()
        tensors = model_tensors(self.state.module)
        return TrainedWeights(
            ((name, full_tensor(tensor)) for name, tensor in tensors.items()),
            {name: TensorSpec.of(tensor) for name, tensor in tensors.items()},
            self.state.step,
            "ema" if self.config.training.ema_decay else "raw",
        )


@dataclass(frozen=True)
class TrainResult:
    """How training ended: ``done`` or ``sigterm``, after ``steps`` steps of this process.

    ``gpu_memory_peak`` is the most bytes that tensors took on this rank's GPU; None on a CPU.
    """

    reason: str
    steps: int
    seconds: float
    gpu_memory_peak: int | None

    @property
    def overall_speed(self) -> float | None:
        """Steps per second of the whole training, warm-up and checkpoints included."""
        return self.steps / self.seconds if self.steps else None
