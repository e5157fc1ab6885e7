"""Everything that a training step changes: weights, AdamW, learning rate, EMA."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.host_snapshot import HostSnapshot
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardedTensorError, ShardSpec
from sm_train.entrypoints.common.background import BackgroundWork
from sm_train.entrypoints.common.checkpoint_layout import PROGRESS_FILE
from sm_train.entrypoints.common.job_config import JobConfig, StageConfig
from sm_train.entrypoints.distributed.local_shard import LocalShard, is_dtensor, to_local
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.entrypoints.training.state_dict import TrainStateDict
from torch import Tensor, nn


class TrainState:
    """One rank's replica of ``module``, or its shard if the module is sharded.

    AdamW and the EMA work on the local shards, without any communication. ``step`` is the number
    of optimizer steps taken.
    """

    def __init__(self, config: JobConfig, module: nn.Module) -> None:
        training = config.training
        self.module = module
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.background = BackgroundWork(self.parameters[0].device)
        self._sharded = any(is_dtensor(parameter) for parameter in self.parameters)
        self._local_weights: list[Tensor] = [*self.parameters]
        if self._sharded:
            # Plain tensors that share the DTensors' memory: AdamW and EMA see local rows only.
            self._local_weights = [
                to_local(parameter).detach().requires_grad_() for parameter in self.parameters
            ]
        self._optimizer = torch.optim.AdamW(
            self._local_weights,
            lr=config.stage.learning_rate,
            weight_decay=training.weight_decay,
            fused=_fused_available(self._local_weights[0].device),
        )
        self._max_grad_norm = training.max_grad_norm
        warmup = training.warmup_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1))
        )
        self._ema: ExponentialMovingAverage | None = None
        self._ema_is_behind = False
        if training.ema_decay:
            self._ema = ExponentialMovingAverage(
                self._local_weights, training.ema_decay, training.ema_start
            )
        self.step = 0
        self.fingerprint = manifest.architecture_hash(module.state_dict())
        self._state_dict = TrainStateDict(module, self._local_weights, self._optimizer, self._ema)

    @property
    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def update(self, norm: Tensor) -> Tensor:
        """Clip the gradients and take one optimizer step, unless they are not finite.

        ``norm`` is the gradients' norm over all ranks, a scalar. Return a scalar, 1.0 if the step
        was skipped. The EMA is one step behind until :meth:`start_ema_update`.
        """
        self._wait_for_background()
        if self._sharded:
            for parameter, weight in zip(self.parameters, self._local_weights, strict=True):
                weight.grad = None if parameter.grad is None else to_local(parameter.grad)
        skipped = (~torch.isfinite(norm)).float()
        excess = torch.clamp(norm / self._max_grad_norm, min=1.0)
        # Fused AdamW divides gradients by grad_scale as it reads them: clipping takes no extra
        # pass over memory.
        if self._optimizer.defaults["fused"]:
            self._optimizer.grad_scale = excess  # type: ignore[attr-defined]
        else:
            gradients = [one.grad for one in self._local_weights if one.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / excess)
        # On a GPU the kernel reads found_inf and skips the update itself, so the CPU need not
        # wait for the norm.
        if norm.is_cuda:
            self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not skipped.item():
            self._optimizer.step()
        self._schedule.step()
        self.zero_grad()
        self._ema_is_behind = self._ema is not None
        self.step += 1
        return skipped

    def start_ema_update(self) -> None:
        """Start the EMA update in the background.

        Call it right before a backward pass, which releases the GIL.
        """
        if self._ema_is_behind and self._ema is not None:
            self._ema_is_behind = False
            self.background.run(self._ema.update)

    def _wait_for_background(self) -> None:
        """Wait until nothing reads the weights any more and the EMA is up to date."""
        self.start_ema_update()
        self.background.join()

    def zero_grad(self) -> None:
        for weight in self._local_weights:
            weight.grad = None
        if self._sharded:
            for parameter in self.parameters:
                parameter.grad = None

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the context; no-op without an EMA."""
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    @torch.no_grad()
    def _swap_ema(self) -> None:
        self._wait_for_background()
        if self._ema is None:
            return
        # One tensor at a time, so that the swap takes the memory of a single tensor.
        for weight, average in zip(self._local_weights, self._ema.averages, strict=True):
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)

    @torch.no_grad()
    def copy_ema_to_weights(self) -> None:
        """Overwrite the weights with their averages; no-op without an EMA."""
        self._wait_for_background()
        if self._ema is not None:
            torch._foreach_copy_([*self._local_weights], self._ema.averages)

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """Return this rank's shards of the state; they share memory with the training.

        Read them only in :attr:`background` work, which runs after the pending EMA update.
        """
        self.start_ema_update()
        return self._state_dict.tensors()

    def progress(self) -> dict[str, int]:
        """Return the counters that belong to the state; the same on all ranks."""
        self._wait_for_background()
        return {
            "schedule": self._schedule.last_epoch,
            "ema_updates": self._ema.updates if self._ema else 0,
        }

    def restore(self, checkpoint: manifest.CheckpointInfo) -> None:
        """Load the state of a checkpoint.

        Raises:
            CheckpointError: it belongs to another model.
        """
        if checkpoint.fingerprint != self.fingerprint:
            raise manifest.CheckpointError(
                f"{checkpoint.folder}: is of another model (weights {checkpoint.fingerprint}, this "
                f"one has {self.fingerprint}); give the run another name or checkpoint folder"
            )
        self._wait_for_background()
        try:
            self._state_dict.restore(manifest.shard_files(checkpoint.folder))
        except ShardedTensorError as error:
            raise manifest.CheckpointError(f"{checkpoint.folder}: {error}") from None
        progress = json.loads((checkpoint.folder / PROGRESS_FILE).read_bytes())
        self._restore_counters(checkpoint.step, progress)

    def roll_back(self, snapshot: HostSnapshot) -> None:
        """Load the state of a snapshot that was taken of this state; a collective."""
        assert snapshot.step is not None
        self._wait_for_background()
        self._state_dict.load(snapshot.load_into)
        self._restore_counters(snapshot.step, snapshot.progress)

    def load_from_stage(self, previous: Path, stage: StageConfig) -> None:
        """Load from the previous stage's last checkpoint what the run file keeps of it.

        Raises:
            CheckpointError: it is incomplete, or belongs to another model.
        """
        files = manifest.shard_files(manifest.read_marker(previous).folder)
        try:
            self._state_dict.load_from_stage(
                files,
                weights=stage.init_from == "raw",
                optimizer=stage.optimizer_state == "keep",
            )
        except ShardedTensorError as error:
            raise manifest.CheckpointError(f"{previous}: {error}") from None

    def _restore_counters(self, step: int, progress: Mapping[str, int]) -> None:
        self._restore_schedule(progress["schedule"])
        if self._ema is not None:
            self._ema.updates = progress["ema_updates"]
        self.step = step

    def _restore_schedule(self, steps: int) -> None:
        """Continue after ``steps`` of the schedule, with the run file's current learning rate."""
        factors = zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        rates = [rate * factor(steps) for rate, factor in factors]
        self._schedule.load_state_dict(
            self._schedule.state_dict() | {"last_epoch": steps, "_last_lr": rates}
        )
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _fused_available(device: torch.device) -> bool:
    """Return whether this PyTorch has fused AdamW on ``device``; the CPU has it from 2.4 on."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()
