"""What is trained and all that a step changes: weights, AdamW, learning rate, average."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpointing import manifest
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardedTensorError, ShardSpec
from sm_train.entrypoints.common.background import BackgroundWork
from sm_train.entrypoints.common.checkpoint_layout import PROGRESS_FILE
from sm_train.entrypoints.common.job_config import JobConfig, StageConfig
from sm_train.entrypoints.distributed.local_shard import LocalShard, is_dtensor, to_local
from sm_train.entrypoints.training.ema import ExponentialMovingAverage
from sm_train.entrypoints.training.state_dict import TrainStateDict
from torch import Tensor, nn


class TrainState:
    """One process's copy of ``module``, or its part of it where that is split.

    AdamW and the average work on what the process owns, without gathering anything. ``step`` is
    how many steps it has learned for.
    """

    def __init__(self, settings: JobConfig, module: nn.Module) -> None:
        training = settings.training
        self.module = module
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.background = BackgroundWork(self.parameters[0].device)
        self._split = any(is_dtensor(one) for one in self.parameters)
        self._owned: list[Tensor] = [*self.parameters]
        if self._split:
            self._owned = [to_local(one).detach().requires_grad_() for one in self.parameters]
        self._optimizer = torch.optim.AdamW(
            self._owned,
            lr=settings.stage.learning_rate,
            weight_decay=training.weight_decay,
            fused=_fused_available(self._owned[0].device),
        )
        self._largest_norm = training.max_grad_norm
        warmup = training.warmup_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1))
        )
        self._average: ExponentialMovingAverage | None = None
        self._behind = False
        if training.ema_decay:
            self._average = ExponentialMovingAverage(
                self._owned, training.ema_decay, training.ema_start
            )
        self.step = 0
        self.fingerprint = manifest.architecture_hash(module.state_dict())
        self._state = TrainStateDict(module, self._owned, self._optimizer, self._average)

    @property
    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def update(self, norm: Tensor) -> Tensor:
        """One step by the gradients, whose norm over all processes this is, clipped to the run's.

        Returns 1.0 where they are no numbers: then nothing is learned from them. Fused AdamW clips
        while it reads them anyway, and on a GPU looks itself whether to learn, so that the host
        need not wait to know. The average is one step behind until :meth:`start_ema_update`.
        """
        self._wait_for_background()
        if self._split:
            for parameter, part in zip(self.parameters, self._owned, strict=True):
                part.grad = None if parameter.grad is None else to_local(parameter.grad)
        skipped = (~torch.isfinite(norm)).float()
        excess = torch.clamp(norm / self._largest_norm, min=1.0)
        if self._optimizer.defaults["fused"]:
            self._optimizer.grad_scale = excess  # type: ignore[attr-defined]
        else:
            gradients = [one.grad for one in self._owned if one.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / excess)
        if norm.is_cuda:
            self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not skipped.item():
            self._optimizer.step()
        self._schedule.step()
        self.zero_grad()
        self._behind = self._average is not None
        self.step += 1
        return skipped

    def start_ema_update(self) -> None:
        """Begin to move the average, beside what comes: best a backward pass, which leaves Python
        alone."""
        if self._behind and self._average is not None:
            self._behind = False
            self.background.run(self._average.update)

    def _wait_for_background(self) -> None:
        """Until nothing reads the weights any more, and the average is theirs."""
        self.start_ema_update()
        self.background.join()

    def zero_grad(self) -> None:
        for one in self._owned:
            one.grad = None
        if self._split:
            for parameter in self.parameters:
                parameter.grad = None

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the average is the weights and the weights wait in its place."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """One by one, so that it takes the memory of one tensor."""
        self._wait_for_background()
        if self._average is None:
            return
        for weight, average in zip(self._owned, self._average.averages, strict=True):
            waiting = weight.clone()
            weight.copy_(average)
            average.copy_(waiting)

    @torch.no_grad()
    def copy_ema_to_weights(self) -> None:
        """Make the average the weights, where one is kept."""
        self._wait_for_background()
        if self._average is not None:
            torch._foreach_copy_([*self._owned], self._average.averages)

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[ShardSpec, LocalShard]:
        """The state as this process has it, by its place in the whole; not copies.

        What reads them must do so :class:`beside <Beside>` the training: the average may be behind.
        """
        self.start_ema_update()
        return self._state.tensors()

    def shared_files(self) -> dict[str, Callable[[Path], None]]:
        """What else all share, as it is now: the name of a file and what writes it."""
        self._wait_for_background()
        progress = {
            "schedule": self._schedule.last_epoch,
            "ema_updates": self._average.updates if self._average else 0,
        }
        return {PROGRESS_FILE: manifest.save_bytes(json.dumps(progress).encode())}

    def restore(self, found: manifest.CheckpointInfo) -> None:
        """Take the state of a checkpoint.

        Raises:
            CheckpointError: it is of another model.
        """
        if found.fingerprint != self.fingerprint:
            raise manifest.CheckpointError(
                f"{found.folder}: is of another model (weights {found.fingerprint}, this one has "
                f"{self.fingerprint}); give the run another name or checkpoint folder"
            )
        self._wait_for_background()
        try:
            self._state.restore(manifest.shard_files(found.folder))
        except ShardedTensorError as error:
            raise manifest.CheckpointError(f"{found.folder}: {error}") from None
        progress: dict[str, Any] = json.loads((found.folder / PROGRESS_FILE).read_bytes())
        self._restore_schedule(progress["schedule"])
        if self._average is not None:
            self._average.updates = progress["ema_updates"]
        self.step = found.step

    def load_from_stage(self, previous: Path, stage: StageConfig) -> None:
        """Begin with what the run file wants of the stage before: its last checkpoint.

        Raises:
            CheckpointError: it is not whole, or of another model.
        """
        files = manifest.shard_files(manifest.read_marker(previous).folder)
        try:
            self._state.load_from_stage(
                files,
                weights=stage.init_from == "raw",
                optimizer=stage.optimizer_state == "keep",
            )
        except ShardedTensorError as error:
            raise manifest.CheckpointError(f"{previous}: {error}") from None

    def _restore_schedule(self, steps: int) -> None:
        """Go on after ``steps`` of the schedule, with the learning rate that the run file says."""
        factors = zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        rates = [rate * factor(steps) for rate, factor in factors]
        self._schedule.load_state_dict(
            self._schedule.state_dict() | {"last_epoch": steps, "_last_lr": rates}
        )
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _fused_available(device: torch.device) -> bool:
    """Whether this PyTorch has the fused AdamW there; before 2.4 it had none for the CPU."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()
